"""Evaluates the weighted reward functions of a run on one response and returns a `Score`.

Runs in a child process of a reward worker. User-defined functions have verl's signature

    compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float | dict
"""

import errno
import inspect
import math
import numbers
import reprlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapo.answers.spelling import printable
from dapo.config.reward import RewardFunctionConfig
from dapo.config.reward_functions import SECTION, labels
from dapo.ground.user_code import describe
from dapo.rewards.calling.loading import Canary, LoadedFunction, load
from dapo.sandbox.program import SandboxError
from dapo.types import Score

MAX_PREDICTION_CHARS = 300
MAX_METRICS = 32  # per function
MAX_KEY_CHARS = 64
ROUNDING = 1e-6  # tolerance of an accuracy
RESERVED = ("score", "acc", "pred")  # all other keys are metrics


class RewardFunctionError(RuntimeError):
    """A reward function raised. The message names the function, the data source, the exception and its line."""


class RewardFunctions:
    """The functions of `reward.functions`, or of one source, loaded once and evaluated on one response at a time."""

    def __init__(self, specs: Sequence[RewardFunctionConfig], *, section: str = SECTION, prefix: str = "") -> None:
        """section, prefix: of the configuration keys and the labels. Raises ValueError naming `SECTION[i]`."""
        if not specs:
            raise ValueError(f"`{section}` is empty; give at least one, such as path math")
        self.labels = tuple(prefix + label for label in labels(specs, section))
        self._weights = [spec.weight for spec in specs]
        self._wrong = [spec.wrong for spec in specs]
        self._functions = [load(spec, index=index, section=section) for index, spec in enumerate(specs)]

    @property
    def reads_last(self) -> int | None:
        """Number of characters at the end of a solution that the functions read; None: all."""
        limits = [function.reads_last for function in self._functions]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    @property
    def runs_programs(self) -> bool:
        return any(function.runs_programs for function in self._functions)

    @property
    def reads_conversation(self) -> bool:
        return any(function.reads_conversation for function in self._functions)

    @property
    def digest(self) -> str:
        """Digest of the functions' files; all workers of a run must agree on it."""
        return " ".join(function.digest for function in self._functions)

    def canaries(self) -> list[tuple[str, Canary]]:
        """Returns every canary with the label of its function, except async ones, whose answers depend on external
        services."""
        return [
            (label, canary)
            for label, function in zip(self.labels, self._functions, strict=True)
            for canary in function.canaries
            if not function.asynchronous
        ]

    def without_canary(self) -> list[str]:
        known = {label for label, _ in self.canaries()}
        return [label for label in self.labels if label not in known]

    def asynchronous(self) -> Iterator[tuple[str, LoadedFunction]]:
        for label, function in zip(self.labels, self._functions, strict=True):
            if function.asynchronous:
                yield label, function

    def counts(self, label: str) -> bool:
        return self._weights[self.labels.index(label)] != 0

    def score_alone(self, label: str, canary: Canary) -> float:
        function = self._functions[self.labels.index(label)]
        value = _call(label, function, "canary", canary.solution_str, canary.ground_truth, canary.extra_info)
        return _as_float(_named(label, function), "score", value["score"] if isinstance(value, dict) else value)

    def at_limit(self, failure: str) -> Score:
        """Returns the score of a response whose scoring reached the CPU or memory limit: `wrong` of each function. A
        better score would reward the policy for breaking the verifier."""
        parts = dict(zip(self.labels, self._wrong, strict=True))
        reward = sum(weight * wrong for weight, wrong in zip(self._weights, self._wrong, strict=True))
        return Score(accuracy=0.0, reward=reward, parts=parts, metrics={}, prediction="", failure=failure)

    def score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: str,
        extra_info: Any = None,
        given: Mapping[str, Any] | None = None,
    ) -> Score:
        """Evaluates all functions on one response. given: results of the async functions, by label.

        parts: score of each function by label, before its weight. reward: the weighted sum. accuracy: `acc` of the
        first function that returns one, else 1.0 if the first function's score is positive and 0.0 if not. metrics: all
        other numbers of the functions, as LABEL/KEY. A score of None or NaN marks the response as unscorable: accuracy
        and reward are then both NaN, so that the filter and the advantages drop the same responses. (A function of
        weight 0 is only recorded.)

        Raises RewardFunctionError if a function raises; TypeError or ValueError if it returns no valid number.
        MemoryError (the child's limit, reported separately) and SandboxError (a sandbox failure) pass through
        unchanged.
        """
        parts: dict[str, float] = {}
        metrics: dict[str, float] = {}
        reward = 0.0
        accuracy: float | None = None
        prediction: str | None = None
        for label, weight, function in zip(self.labels, self._weights, self._functions, strict=True):
            if function.asynchronous:
                value = (given or {})[label]
            else:
                value = _call(label, function, data_source, solution_str, ground_truth, extra_info)
            details: dict[str, Any] = value if isinstance(value, dict) else {"score": value}
            named = _named(label, function)
            if "score" not in details:
                keys = reprlib.repr(sorted(map(str, details)))
                raise TypeError(f"{named} gave a dict without `score` (keys {keys})")
            parts[label] = _as_float(named, "score", details["score"])
            if weight:
                reward += weight * parts[label]
            if accuracy is None and "acc" in details:
                accuracy = _as_share(named, details["acc"])
            if prediction is None and details.get("pred") is not None:
                prediction = _printable(details["pred"])
            metrics |= _metrics(label, details)
        if accuracy is None:
            first = parts[self.labels[0]]
            accuracy = math.nan if math.isnan(first) else float(first > 0)
        if math.isnan(reward) or math.isnan(accuracy):
            reward = accuracy = math.nan
        return Score(
            accuracy=accuracy, reward=reward, parts=parts, metrics=metrics, prediction=prediction or "", failure=""
        )


def _call(label: str, function: LoadedFunction, source: str, text: str, truth: str, extra_info: Any) -> Any:
    try:
        return function.ask(source, text, truth, extra_info)
    except (MemoryError, SandboxError):
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise MemoryError from error
        raise error_of(label, function, source, error) from error


def error_of(label: str, function: LoadedFunction, source: str, error: BaseException) -> RewardFunctionError:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == function.file]
    place = (own or frames)[-1]
    return RewardFunctionError(
        f"reward function `{label}` raised {describe(error)} on data source {source!r}, at line {place.lineno} of "
        f"{Path(place.filename).name}"
    )


def _metrics(label: str, details: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers under keys that are not reserved, at most `MAX_METRICS`, because each name becomes a
    curve."""
    found: dict[str, float] = {}
    for key, value in details.items():
        if key not in RESERVED and isinstance(value, numbers.Real | np.bool_) and len(found) < MAX_METRICS:
            try:
                number = float(value)
            except OverflowError:  # an int may have any number of digits
                continue
            if math.isfinite(number):
                found[f"{label}/{_printable(key)[:MAX_KEY_CHARS]}"] = number
    return found


def _named(label: str, function: LoadedFunction) -> str:
    return f"reward function `{label}` ({Path(function.file).name})"


def _as_float(named: str, field: str, value: Any) -> float:
    """Returns a finite number or NaN. Accepts bool, int, float and numpy scalars; None becomes NaN."""
    if value is None:
        return math.nan
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError(
            f"{named} gave a coroutine as its {field}, which nobody awaits; write it as `async def` and await what it "
            "calls"
        )
    if not isinstance(value, numbers.Real | np.bool_):
        # A text may come from the model and must not be logged.
        shown = f"{type(value).__name__}" if isinstance(value, str | bytes) else reprlib.repr(value)
        raise TypeError(f"{named} gave {shown} as its {field}; give a number, or None where it cannot tell")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise ValueError(f"{named} gave an infinite {field}; give a finite number, or None")
    return number


def _as_share(named: str, value: Any) -> float:
    """Returns an accuracy, 0 to 1, or NaN. Values outside by a rounding error are clipped."""
    number = _as_float(named, "acc", value)
    if not -ROUNDING <= number <= 1.0 + ROUNDING and not math.isnan(number):
        raise ValueError(
            f"{named} gave {number:g} as its acc; give 0 (wrong) to 1 (right), or None where it cannot tell"
        )
    return min(1.0, max(0.0, number)) if not math.isnan(number) else number


def _printable(prediction: Any) -> str:
    return printable(str(prediction)[:MAX_PREDICTION_CHARS])
