"""Loads reward functions: ready ones by short name, user-defined ones from a file or an importable module. A module may
define `READS_LAST`, `RUNS_PROGRAMS` (see `LoadedFunction`) and `canaries(name, kwargs)`, which yields known answers as
(solution_str, ground_truth, extra_info, score)."""

import copy
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from dapo.config.reward import JudgeConfig, RewardFunctionConfig
from dapo.config.reward_functions import PACKAGE, READY, SECTION, ready_name
from dapo.ground.redact import redacted
from dapo.ground.user_code import describe, function_in, load_module
from dapo.rewards.calling.adapters import adapted

MODULES = {name: f"{PACKAGE}.{name}" for name in READY}
OWN, OWN_MODEL = "own", "judge"  # replace URL and model name of a judge served by the run


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """An answer with a known score. Made by `canaries` of a reward module, scored by the child processes."""

    solution_str: str
    ground_truth: str
    extra_info: dict[str, Any]
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedFunction:
    """A reward function, ready to be called. reads_last: number of characters at the end of a solution that it reads;
    None: all. runs_programs: whether it runs programs of the model in the sandbox. file: where it is defined, for
    messages. digest: of that file. reads_conversation: whether it is told the prompt's messages."""

    call: Callable[..., Any]
    kwargs: dict[str, Any]
    reads_last: int | None
    runs_programs: bool
    canaries: tuple[Canary, ...]
    file: str
    digest: str
    asynchronous: bool
    reads_conversation: bool

    def ask(self, source: str, text: str, truth: str, extra_info: Any) -> Any:
        """Calls the function by keyword, as verl does, because a user-defined one may order its parameters differently.
        Arguments are copied, so that its changes do not affect other calls."""
        own = copy.deepcopy({"extra_info": extra_info, **self.kwargs})
        return self.call(data_source=source, solution_str=tail(text, self.reads_last), ground_truth=truth, **own)


def load(spec: RewardFunctionConfig, *, index: int = 0, section: str = SECTION) -> LoadedFunction:
    """Returns the function of an entry; index is its position in the section. Raises ValueError naming
    `SECTION[index]`, the value and the remedy."""
    key = f"{section}[{index}]"
    _check_numbers(spec, key)
    if spec.path.endswith(".py") and not Path(spec.path).expanduser().is_file():
        raise ValueError(f"`{key}.path` ({spec.path!r}): there is no such file; give an absolute path")
    module = load_module(f"{key}.path", spec.path, ready=MODULES)
    named = f"`{key}.name` ({spec.name!r})"
    adapter = adapted(vars(module).get(spec.name), spec.signature, named)
    function = adapter or function_in(module, spec.name, named)
    _check_signature(function, spec, key)
    reads_last = vars(module).get("READS_LAST")
    if not (reads_last is None or type(reads_last) is int and reads_last >= 0):
        raise ValueError(f"`{key}.path` ({spec.path}): READS_LAST ({reads_last!r}) must be a number of characters")
    return LoadedFunction(
        call=function,
        kwargs=dict(spec.kwargs),
        reads_last=reads_last,
        runs_programs=vars(module).get("RUNS_PROGRAMS") is True,
        canaries=_canaries(module, spec, key),
        file=str(module.__file__),
        digest=hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest(),
        asynchronous=inspect.iscoroutinefunction(function),
        reads_conversation=adapter is not None,
    )


def with_judge(functions: Sequence[RewardFunctionConfig], judge: JudgeConfig) -> list[RewardFunctionConfig]:
    """Returns the functions, with the keys of `reward.judge` as default `kwargs` of each ready `judge`. The URL is
    `OWN` if the run starts the judge itself."""
    keys = asdict(judge)
    if keys.pop("engine")["path"]:
        keys |= {"url": OWN, "model": OWN_MODEL}
    return [
        replace(spec, kwargs={**keys, **spec.kwargs}) if ready_name(spec.path) == "judge" else spec
        for spec in functions
    ]


def tail(text: str, reads_last: int | None) -> str:
    return text if reads_last is None else text[max(0, len(text) - reads_last) :]


def _check_numbers(spec: RewardFunctionConfig, key: str) -> None:
    for field, value in (("weight", spec.weight), ("wrong", spec.wrong)):
        if not math.isfinite(value):
            raise ValueError(f"`{key}.{field}` ({value}) must be a finite number")
    if not _is_plain(spec.kwargs):
        raise ValueError(
            f"`{key}.kwargs` ({redacted(spec.kwargs)}) must be texts, numbers, lists and mappings with text keys"
        )
    if spec.weight * spec.wrong > 0:
        raise ValueError(
            f"`{key}.wrong` ({spec.wrong}) times `{key}.weight` ({spec.weight}) must not be above 0: it would pay "
            "a policy for breaking the function; give `wrong` the score that the weight makes the worst"
        )


def _is_plain(kwargs: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(json.dumps(kwargs)) == kwargs)
    except (TypeError, ValueError):
        return False


def _check_signature(function: Callable[..., Any], spec: RewardFunctionConfig, key: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a C callable without a signature
        return
    try:
        signature.bind(data_source="", solution_str="", ground_truth="", extra_info={}, **spec.kwargs)
    except TypeError as error:
        raise ValueError(
            f"`{key}` ({spec.name} of {spec.path}) cannot be called with data_source, solution_str, ground_truth, "
            f"extra_info and `{key}.kwargs` {sorted(spec.kwargs)}: {error}; fix the function or the kwargs"
        ) from None


def _canaries(module: ModuleType, spec: RewardFunctionConfig, key: str) -> tuple[Canary, ...]:
    give: Callable[[str, dict[str, Any]], Iterable[tuple[str, str, dict[str, Any], float]]] | None
    give = vars(module).get("canaries")
    if give is None:
        return ()
    try:
        return tuple(
            Canary(solution_str=text, ground_truth=truth, extra_info=extra, score=float(score))
            for text, truth, extra, score in give(spec.name, dict(spec.kwargs))
        )
    except Exception as error:
        raise ValueError(
            f"`{key}.path` ({spec.path}): canaries({spec.name!r}, kwargs) failed ({describe(error)}); it must give "
            "(solution_str, ground_truth, extra_info, score) of known answers"
        ) from error
