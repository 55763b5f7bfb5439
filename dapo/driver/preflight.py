"""Preflight checks on the driver, before any worker starts: learning-rate schedule, model files, user-defined
functions, installation."""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from dapo.config.facts.hub import unreachable
from dapo.config.facts.model_class import MASKLESS, OTHER, why_not_packed
from dapo.config.facts.model_files import INDEX, SINGLE, offline_snapshot, tensor_problems, weights_problems
from dapo.config.paths import checked_data, data_parts, not_on_hub, resolve_path
from dapo.config.reward import RewardConfig, RewardFunctionConfig, SandboxConfig
from dapo.config.rules.model import config_problems, reads_safetensors
from dapo.config.schema import Config
from dapo.data.files import read_chunks
from dapo.data.sources import held_out_files, train_files
from dapo.report.redact import redacted
from dapo.report.sinks import choice
from dapo.rewards import judge
from dapo.rewards.calling import tried
from dapo.rewards.calling.by_entry import section_of, source_functions
from dapo.rewards.calling.loading import SECTION, LoadedFunction, labels, load, ready_name, with_judge
from dapo.sandbox.confine import python_paths
from dapo.turns.loading import load as load_rollout
from dapo.turns.loading import runs_programs


def preflight(cfg: Config, *, trains: bool = True) -> None:
    """Raises ValueError with one line per problem: key, value and remedy. trains: as for `validate`."""
    # A torchvision of the wrong build breaks the import of transformers, which the schedule needs.
    if broken := [*_torchvision()]:
        raise ValueError("\n".join(broken))
    from dapo.own.check import own_functions  # loads torch, as the schedule does
    from dapo.schedule import check_rates

    problems = [
        # Over the whole run: transformers uses many arguments of a schedule only at late steps.
        *_refusal(lambda: check_rates(cfg)),
        *(_attention(cfg) if trains else ()),
        *_models(cfg, trains=trains),
        *_architecture(cfg, trains=trains),
        *_reward_functions(cfg),
        *choice.problems(cfg),
        *_rollout_function(cfg),
        *(own_functions(cfg) if trains else ()),
    ]
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))


def early_problems(cfg: Config, warn: Callable[[str], None]) -> list[str]:
    """Returns problems that are found without torch and transformers. warn: receives those that do not stop a run."""
    functions = [*_reward_functions(cfg)]
    problems = [*_data(cfg), *_models(cfg, trains=True), *functions, *choice.problems(cfg), *_rollout_function(cfg)]
    if not functions:
        for fails, line in rewards_tried(cfg):
            problems += [line] if fails else []
            if not fails:
                warn(line)
    return [*dict.fromkeys(problems)]


def rewards_tried(cfg: Config) -> Iterator[tuple[bool, str]]:
    """Calls each user-defined reward function on made-up responses to the first row of its data, if that is a local
    file. Yields (fails on every response, message) for responses without a score. All functions must be loadable."""
    own = source_functions(cfg.data.sources)
    for entry, specs in {"": cfg.reward.functions, **own}.items():
        row = _first_row(cfg, entry, own)
        for index, spec in enumerate(specs if row else ()):
            key = f"{section_of(entry) if entry else SECTION}[{index}]"
            function = None if ready_name(spec.path) else load(spec, index=index)
            if row and function and not function.asynchronous and not function.runs_programs:
                yield from tried.doubts(spec, row, cfg.reward.limits, key)


def _first_row(cfg: Config, entry: str, own: Collection[str]) -> tried.Row | None:
    """Returns the first row that the functions of `entry` score; "" means `reward.functions`. None if the file is not
    local or the row is invalid: loading the data reports that."""
    for one in train_files(cfg.data):
        if one.reading.entry != entry and (entry or one.reading.entry in own):
            continue
        try:
            name = checked_data(one.files[0], key=one.key)
            chunk = next(read_chunks(name, one.key, one.reading)) if Path(name).is_file() else None
            if chunk is not None:
                rest, truth = chunk.rest(0), chunk.reward_models[0]["ground_truth"]
                extra = dict(rest.get("extra_info") or {})
                return tried.Row(data_source=rest["data_source"], ground_truth=truth, extra_info=extra)
        except (ValueError, StopIteration, LookupError, TypeError):
            return None
    return None


def _data(cfg: Config) -> Iterator[str]:
    asked = dict[str, Exception | None]()
    for one in (*train_files(cfg.data), *(held_out_files(cfg.data) if cfg.trainer.only == "both" else ())):
        for name in one.files:
            try:
                repository, *_ = data_parts(checked_data(name, key=one.key))
            except ValueError as error:
                yield str(error)
                continue
            if Path(repository).exists():
                continue
            if repository not in asked:
                asked[repository] = unreachable(repository, "dataset")
            if error_there := asked[repository]:
                yield "; ".join(not_on_hub(one.key, repository, error_there, "file"))


def _refusal(call: Callable[[], object]) -> Iterator[str]:
    try:
        call()
    except ValueError as error:
        yield str(error)


def _attention(cfg: Config) -> Iterator[str]:
    """Checks the attention name here: the ranks would fail only after all processes have started."""
    from transformers import AttentionInterface

    name, known = cfg.model.attn_implementation, sorted(AttentionInterface().valid_keys())
    if name not in ("auto", *known):
        yield f"`model.attn_implementation` ({name}) is unknown to transformers; take auto or one of {', '.join(known)}"
    elif name == "flash_attention_2" and not any(map(importlib.util.find_spec, ("flash_attn", "kernels"))):
        yield (
            f"`model.attn_implementation` ({name}) needs the package flash-attn, which is not installed; install it on "
            "every node of the ranks, or take auto, which needs no package"
        )


def _models(cfg: Config, *, trains: bool) -> Iterator[str]:
    """Checks the model files (offline: those in the hub cache) for missing and truncated weights, which would otherwise
    be found only after all processes have started."""
    others = {"reward.model.path": cfg.reward.model.path, "reward.judge.engine.path": cfg.reward.judge.engine.path}
    wanted = (SINGLE, INDEX) if trains else ("*.safetensors",) if reads_safetensors(cfg) else ()
    for key, path in {"model.path": cfg.model.path, **others}.items():
        folder = Path(resolve_path(path)) if path else None
        again, whole = "copy or download the model again", "give the directory of a whole model"
        if folder is not None and not folder.is_dir():
            if error := unreachable(path, "model"):
                yield "; ".join(not_on_hub(key, path, error))
                continue
            folder = offline_snapshot(path)
            again = whole = f"`hf download {path}`, or unset HF_HUB_OFFLINE"
        if folder is None:
            continue
        if found := weights_problems(folder):
            yield f"`{key}` ({path}): {found[0]}; {again}"
        elif key == "model.path" and wanted and not any(any(folder.glob(name)) for name in wanted):
            yield f"`{key}` ({path}) holds no weights ({' or '.join(wanted)}); {whole}"


def _architecture(cfg: Config, *, trains: bool) -> Iterator[str]:
    """Reads the model's configuration as the ranks do, from the hub if necessary."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    path, trusted = resolve_path(cfg.model.path), cfg.model.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    except OSError:  # no such model: reported when its tokenizer is loaded
        return
    except (ValueError, KeyError) as error:
        remedy = "choose another model, or install a transformers that knows it"
        if "trust_remote_code" in str(error):
            remedy = "set `model.trust_remote_code=true` if you trust that code"
        yield f"`model.path` ({path}): transformers cannot read its config.json: {_first(error)}; {remedy}"
        return
    if trains and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not trusted:
        yield (
            f"`model.path` ({path}) is of the kind {config.model_type}, of which transformers has no causal language "
            "model; choose another model, or set `model.trust_remote_code=true` where it brings its own code"
        )
    masked = cfg.model.attn_implementation not in MASKLESS
    if trains and (why := _class(config, path, trusted=trusted, masked=masked)):
        yield f"`model.path` ({path}): {why}"
    elif trains and (folder := Path(path) if Path(path).is_dir() else offline_snapshot(path)):
        yield from (f"`model.path` ({path}): {problem}" for problem in tensor_problems(folder, config.to_dict()))
    if not Path(path).is_dir():
        yield from config_problems(cfg, config.to_dict(), trains=trains)


def _class(config: Any, path: str, *, trusted: bool, masked: bool) -> str:
    """Returns why the model class cannot be used, or "". Code that cannot be imported is reported by the ranks."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    own = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if own is not None and trusted:
        try:
            model, base = get_class_from_dynamic_module(own, path), None
        except Exception:
            return ""
    else:
        model, base = (mapping.get(type(config), None) for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING))
    if model is None or isinstance(model, tuple):  # one of several, chosen by the configuration
        return ""
    if own is None and model.config_class is not type(config.get_text_config()):
        return f"{model.__name__} is not of text alone{OTHER}"
    why = why_not_packed(model, None if isinstance(base, tuple) else base, masked=masked)
    return why and f"{model.__name__} {why}"


def _reward_functions(cfg: Config) -> Iterator[str]:
    if not cfg.reward.functions:
        yield "`reward.functions` is empty; give at least one, such as {path: math}"
    own = {section_of(name): specs for name, specs in source_functions(cfg.data.sources).items()}
    most = 0
    for section, given in {SECTION: cfg.reward.functions, **own}.items():
        functions = with_judge(given, cfg.reward.judge)
        most = max(most, (yield from _section(section, functions, cfg.reward.limits.sandbox)))
        if cfg.reward.overlong_buffer.enable and any(ready_name(spec.path) == "overlong" for spec in functions):
            yield (
                f"`{section}` has `overlong`, and `reward.overlong_buffer.enable` (true) punishes the same tokens once "
                "more; drop one of the two"
            )
    if most and cfg.reward.remote.calls_per_minute:
        yield from _rate(cfg.reward, most)


def _rate(cfg: RewardConfig, functions: int) -> Iterator[str]:
    """Checks `reward.timeout_s` against the rate limit: if the service does not answer, a worker retries all its
    responses in flight before it drops one. functions: number of async functions per response."""
    calls = cfg.concurrency * (cfg.remote.retries + 1) * functions
    turns_s = 60 * cfg.num_workers / cfg.remote.calls_per_minute * calls
    if cfg.timeout_s <= cfg.remote.timeout_s + turns_s:
        yield (
            f"`reward.timeout_s` ({cfg.timeout_s:g}) must be longer than `reward.remote.timeout_s` "
            f"({cfg.remote.timeout_s:g}) and the {turns_s:g} s in which a worker makes its {calls} calls "
            f"(`reward.concurrency` x retries x async functions, {functions}) at `reward.remote.calls_per_minute`, or "
            "a worker passes for lost while it waits for others; raise the one or lower the others"
        )


def _section(
    section: str, functions: Sequence[RewardFunctionConfig], sandbox: SandboxConfig
) -> Generator[str, None, int]:
    asynchronous = 0
    for index, spec in enumerate(functions):
        try:
            function = load(spec, index=index, section=section)
        except ValueError as error:
            yield str(error)
            continue
        asynchronous += function.asynchronous
        if function.runs_programs:
            yield from _refusal(lambda: python_paths(sandbox.packages))
        if ready_name(spec.path):  # user-defined functions run only in child processes
            yield from _known_answers(function, f"{section}[{index}]")
        if ready_name(spec.path) == "judge":
            yield from judge.problems(function.kwargs)
    yield from _refusal(lambda: labels(functions, section))
    return asynchronous


def _rollout_function(cfg: Config) -> Iterator[str]:
    try:
        if cfg.rollout.function.path:
            function = load_rollout(cfg.rollout.function)
            if runs_programs(function, cfg.rollout.function.kwargs):
                python_paths(cfg.reward.limits.sandbox.packages)
    except ValueError as error:
        yield str(error)


def _known_answers(function: LoadedFunction, key: str) -> Iterator[str]:
    """Calls a function on its known answers, because invalid combinations of kwargs show only then."""
    try:
        for canary in function.canaries:
            function.call(
                data_source="canary",
                solution_str=canary.solution_str,
                ground_truth=canary.ground_truth,
                extra_info=canary.extra_info,
                **function.kwargs,
            )
    except ValueError as error:
        yield f"`{key}.kwargs` ({redacted(function.kwargs)}): {error}"


def _torchvision() -> Iterator[str]:
    """Reports a CUDA torchvision next to a CPU torch: `import transformers` then fails with an error about nms."""
    try:
        vision = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return
    torch_version = importlib.metadata.version("torch")
    if "+cpu" in torch_version and "+cpu" not in vision:
        yield (
            f"torchvision {vision} is built for CUDA, but torch is {torch_version}; dapo needs no torchvision: "
            "run `pip uninstall torchvision`"
        )


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0].partition(". ")[0]
