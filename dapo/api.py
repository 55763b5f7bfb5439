"""dapo from Python, in a script or a notebook:

    from dapo import train
    run = train("dapo_tiny", reward=my_function, trainer={"total_steps": 20})
    run.metrics["eval/accuracy"]

A run has a process of its own (that of `dapo train`), so that nothing of Ray, torch or vLLM stays in a notebook and
Ctrl-C saves what was trained.
"""

import json
import os
import re
import signal
import site
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.config.compose import compose
from dapo.ground.console import EXIT_INTERRUPTED
from dapo.rewards.as_file import file_of

if TYPE_CHECKING:
    from pandas import DataFrame

Reward = str | Callable[..., Any] | Mapping[str, Any]
WRITTEN = re.compile(r"written to (.+)")  # by dapo.evaluate


class Run:
    """A run on disk, finished or not. path: its directory (`trainer.output_dir`)."""

    def __init__(self, path: str | Path) -> None:
        """Raises ValueError if there is no run."""
        from dapo.results.runs import read_run

        self.path = Path(path)
        read_run(self.path)

    @property
    def metrics(self) -> "DataFrame":
        """A row per step, a column per metric; NaN where a step has no value."""
        from pandas import DataFrame

        from dapo.results.runs import read_run

        found: dict[int, dict[str, Any]] = {}
        for record in read_run(self.path).records:
            found.setdefault(record["step"], {}).update(record)
        return (
            DataFrame.from_dict(found, orient="index")
            .rename_axis("step")
            .sort_index()
            .drop(columns="step", errors="ignore")
        )

    @property
    def samples(self) -> "DataFrame":
        """A row per response, with prompt, ground truth, accuracy and reward: the view `answers` of
        dapo/report/store/README.md."""
        from pandas import DataFrame

        from dapo.report.store.reader import Reader

        with Reader(self.path) as store:
            return DataFrame(store.all_answers())

    @property
    def checkpoint(self) -> Path | None:
        """The Hugging Face export of the newest checkpoint, as transformers and vLLM load it."""
        found = sorted(self.path.glob("checkpoints/step_*/hf"))
        return found[-1] if found else None

    def __repr__(self) -> str:
        from dapo.results.figures import results
        from dapo.results.runs import read_run
        from dapo.results.summary import text

        run = read_run(self.path)
        return f"{self.path}\n{text(results(run)) if run.steps else 'no step so far'}"

    def _repr_png_(self) -> bytes | None:
        """The learning curves, as a notebook shows the run."""
        curves = self.path / "curves.png"
        return curves.read_bytes() if curves.is_file() else None


def train(experiment: str | None = None, *, reward: Reward | list[Reward] | None = None, **overrides: Any) -> Run:
    """Trains, or continues, as `dapo train EXPERIMENT KEY=VALUE ...` does, and returns the run.

    reward: a function with `compute_score`'s parameters, a path or name as in `reward.functions[].path`, or a mapping
    with the keys of an entry of `reward.functions`, of which `path` may be a function; or several of them. overrides:
    sections as mappings, `trainer={"seed": 1}`, or keys, `**{"trainer.seed": 1}`.
    Raises ValueError for wrong input and RuntimeError for a failed run, both with the remedy; KeyboardInterrupt after
    Ctrl-C, when what was trained is saved.
    """
    arguments = _arguments(overrides)
    cfg = compose(arguments, experiment)
    if reward is not None:
        folder = Path(cfg.trainer.output_dir).expanduser().absolute().parent / "functions"
        entries = [_entry(one, folder) for one in (reward if isinstance(reward, list | tuple) else [reward])]
        arguments += _arguments({"reward.functions": entries})
        cfg = compose(arguments, experiment)
    _execute("dapo.main_ppo", arguments, experiment)
    return Run(Path(cfg.trainer.output_dir).expanduser().absolute())


def evaluate(experiment: str | None = None, *, model: str | Path | None = None, **overrides: Any) -> dict[str, Any]:
    """Evaluates a model as `dapo evaluate` does; returns what that writes: accuracies with intervals, and the score of
    every answer. model: a directory or hub name, such as `run.checkpoint`. Raises as `train` does."""
    chosen = {} if model is None else {"model.path": str(model)}
    lines = _execute("dapo.tools.evaluate", _arguments({**overrides, **chosen}), experiment)
    written = next(filter(None, map(WRITTEN.match, reversed(lines))))
    found: dict[str, Any] = json.loads(Path(written[1]).read_text(encoding="utf-8"))
    return found


def inspect(run: str | Path) -> Run:
    """Returns the run in a directory, also while it goes on. Raises ValueError if there is none."""
    return Run(run)


def _entry(reward: Reward, folder: Path) -> dict[str, Any]:
    entry = dict(reward) if isinstance(reward, Mapping) else {"path": reward}
    if callable(function := entry.get("path")):
        entry |= {"path": str(file_of(function, folder)), "name": function.__name__}
    return entry


def _arguments(overrides: Mapping[str, Any], above: str = "") -> list[str]:
    found: list[str] = []
    for name, value in overrides.items():
        if isinstance(value, Mapping) and value:
            found += _arguments(value, f"{above}{name}.")
        else:
            found.append(f"{above}{name}={_written(value)}")
    return found


def _written(value: Any) -> str:
    """Returns the value in Hydra's grammar, in which keys of mappings have no quotes."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}: {_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value))}]"
    return json.dumps(value if value is None or isinstance(value, int | float) else str(value), ensure_ascii=False)


def _execute(module: str, arguments: Sequence[str], experiment: str | None) -> list[str]:
    """Runs the module in a process of its own and shows its output; returns its last lines where it is no terminal."""
    chosen = [] if experiment is None else [f"+experiment={experiment}"]
    root = str(Path(__file__).resolve().parents[1])
    known = root in (
        *site.getsitepackages(),
        site.getusersitepackages(),
    )  # before the standard library it would hide it
    paths = [*([] if known else [root]), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", module, *chosen, *arguments]
    child = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert child.stdout is not None
    lines: deque[str] = deque(maxlen=100)
    while True:
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip("\n"))
            code = child.wait()
            break
        except KeyboardInterrupt:  # the run saves and ends; a second one ends it at once
            child.send_signal(signal.SIGINT)
    if code in (EXIT_INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if code:
        at = max((number for number, line in enumerate(lines) if line.startswith("dapo: ")), default=0)
        raise RuntimeError("\n".join(list(lines)[at:]).removeprefix("dapo: "))
    return list(lines)
