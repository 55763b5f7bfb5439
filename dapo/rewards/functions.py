"""A person's own reward functions: loaded by path and name, then evaluated with their weights on one response.

In: `reward.functions` of the configuration, and a response's text; out: a `Score`. Runs in a reward worker: pure, but
for the code that the person brings, in verl's signature
`compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict`.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import reprlib
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dapo.config import RewardFunctionConfig
from dapo.types import Score

MAX_PREDICTION_CHARS = 300
MAX_MESSAGE_CHARS = 200  # of a person's exception, which may quote the model's text


class RewardFunctionError(RuntimeError):
    """A reward function raised; the message names the function, the data source and the exception."""


class RewardFunctions:
    """The weighted functions of `reward.functions`, loaded once, evaluated on one response at a time."""

    def __init__(self, specs: Sequence[RewardFunctionConfig]) -> None:
        """Load every function. Raises ValueError naming `reward.functions[i]` for what cannot be loaded or weighted."""
        if not specs:
            raise ValueError("`reward.functions` is empty; give at least one, such as path dapo.rewards.math")
        for index, spec in enumerate(specs):
            if not math.isfinite(spec.weight):
                raise ValueError(f"`reward.functions[{index}].weight` ({spec.weight}) must be a finite number")
        self.labels = _labels(specs)
        self._weights = [spec.weight for spec in specs]
        self._functions = [load_reward_function(spec.path, spec.name, index=i) for i, spec in enumerate(specs)]

    def score(self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Score:
        """Evaluate all functions on one response.

        parts: what each function gave, by label, before its weight. reward: the weighted sum. accuracy: the `acc` of
        the first function that gives one, else 1.0 where the first function's score is positive and 0.0 where not. A
        function that gives None or NaN finds the response unscorable: accuracy and reward are then both NaN, so that
        the filter and the advantages leave out the same responses (a function of weight 0 is only recorded).

        Raises RewardFunctionError when a function raises, TypeError or ValueError when it gives no usable number.
        MemoryError passes as it is: it is the limit of the worker's child process, which has a verdict of its own.
        """
        parts: dict[str, float] = {}
        reward = 0.0
        accuracy: float | None = None
        prediction: str | None = None
        for label, weight, function in zip(self.labels, self._weights, self._functions, strict=True):
            value = _call(label, function, data_source, solution_str, ground_truth, extra_info)
            details: dict[str, Any] = value if isinstance(value, dict) else {"score": value}
            if "score" not in details:
                raise TypeError(f"reward function `{label}` gave a dict without `score` (keys {sorted(details)})")
            parts[label] = _as_float(label, "score", details["score"])
            if weight:
                reward += weight * parts[label]
            if accuracy is None and "acc" in details:
                accuracy = _as_float(label, "acc", details["acc"])
            if prediction is None and details.get("pred") is not None:
                prediction = _printable(details["pred"])
        if accuracy is None:
            first = parts[self.labels[0]]
            accuracy = math.nan if math.isnan(first) else float(first > 0)
        if math.isnan(reward) or math.isnan(accuracy):
            reward = accuracy = math.nan
        return Score(accuracy=accuracy, reward=reward, parts=parts, prediction=prediction or "")


def load_reward_function(path: str, name: str, *, index: int = 0) -> Callable[..., Any]:
    """The function `name` of `path`, a Python file (*.py) or a dotted module; index is its place in the configuration.

    A file is loaded under a name of its own: it shadows no module, and its folder does not enter the search path.
    Raises ValueError naming `reward.functions[index].path` or `.name`, the value and the remedy.
    """
    module = _load_module(path, f"reward.functions[{index}].path")
    key = f"reward.functions[{index}].name"
    members = vars(module)
    if name not in members:
        names = [member for member, value in members.items() if callable(value) and not member.startswith("_")]
        near = difflib.get_close_matches(name, names, cutoff=0.4) or names[:5]
        hint = f"did you mean {' or '.join(near)}?" if near else "it defines no public function"
        raise ValueError(f"`{key}` ({name!r}) is not in {path}; {hint}")
    function = members[name]
    if not callable(function):
        raise ValueError(f"`{key}` ({name!r}) in {path} is a {type(function).__name__}; it must be a function")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"`{key}` ({name!r}) in {path} is an async function; give a plain one")
    return function


def _load_module(path: str, key: str) -> ModuleType:
    """Import a file or a dotted module. Code that ends the process at import (SystemExit) is an import error too."""
    file = Path(path).expanduser().resolve() if path.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"`{key}` ({path!r}): there is no file {file}; give an absolute path or a dotted module")
    try:
        return importlib.import_module(path) if file is None else _load_file(file)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"`{key}` ({path!r}) cannot be imported ({_describe(error)}); give a Python file (*.py) or a dotted module "
            "that can be imported on every node"
        ) from error


def _load_file(file: Path) -> ModuleType:
    name = f"dapo_reward_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _labels(specs: Sequence[RewardFunctionConfig]) -> tuple[str, ...]:
    """A name per function for metrics: its own, or module.name where several share it, as verl's convention invites."""
    names = [spec.name for spec in specs]
    labels: list[str] = []
    for index, spec in enumerate(specs):
        module = Path(spec.path).stem if spec.path.endswith(".py") else spec.path
        shared = names.count(spec.name) > 1 or spec.name == "overlong"  # the worker records Eq. 13's penalty so
        label = f"{module}.{spec.name}" if shared else spec.name
        if label in labels:
            raise ValueError(
                f"`reward.functions[{index}]` ({label}) has the name of `reward.functions[{labels.index(label)}]`; "
                "rename one, or drop it if they are the same"
            )
        labels.append(label)
    return tuple(labels)


def _call(label: str, function: Callable[..., Any], source: str, text: str, truth: str, extra_info: Any) -> Any:
    try:
        # By keyword, as verl calls it: a person's function may order its parameters otherwise.
        return function(data_source=source, solution_str=text, ground_truth=truth, extra_info=extra_info)
    except MemoryError:
        raise
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise RewardFunctionError(
            f"reward function `{label}` raised {_describe(error)} on data source {source!r}, at line {line.lineno} of "
            f"{Path(line.filename).name}"
        ) from error


def _as_float(label: str, field: str, value: Any) -> float:
    """A finite number or NaN. Numbers are bool, int, float, numpy's scalars; None is NaN."""
    if value is None:
        return math.nan
    if not isinstance(value, numbers.Real | np.bool_):
        # A text may be the model's own words, which no log shall hold.
        shown = f"{type(value).__name__}" if isinstance(value, str | bytes) else reprlib.repr(value)
        raise TypeError(
            f"reward function `{label}` gave {shown} as its {field}; give a number, or None where it cannot tell"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise ValueError(f"reward function `{label}` gave an infinite {field}; give a finite number, or None")
    return number


def _printable(prediction: Any) -> str:
    """At most 300 characters of the prediction that any file and database can hold."""
    text = str(prediction)[:MAX_PREDICTION_CHARS]
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _describe(error: BaseException) -> str:
    """Type and shortened message; escaped, because it may quote the model's text."""
    message = str(error)
    short = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."
    return f"{type(error).__name__}: {ascii(short)[1:-1]}"
