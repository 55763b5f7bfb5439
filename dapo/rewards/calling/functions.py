"""Evaluates the weighted reward functions of a run on one response.

In: `reward.functions` of the configuration, and a response's text; out: a `Score`. Runs in a reward worker's child
process: pure, but for the code that a person brings, in verl's signature
`compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float | dict`.
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

from dapo.config.reward import RewardFunctionConfig
from dapo.rewards.calling.loading import SECTION, Canary, LoadedFunction, describe, labels, load
from dapo.rewards.reading.spelling import printable
from dapo.sandbox.program import SandboxError
from dapo.types import Score

MAX_PREDICTION_CHARS = 300
MAX_METRICS = 32  # of one function
MAX_KEY_CHARS = 64
ROUNDING = 1e-6  # of an accuracy
RESERVED = ("score", "acc", "pred")  # all else that a function gives is a metric


class RewardFunctionError(RuntimeError):
    """Says that a reward function raised; names the function, the data source, the exception and its place."""


class RewardFunctions:
    """Holds the functions of `reward.functions`, or of one source, loaded once, evaluated on one response at a time."""

    def __init__(self, specs: Sequence[RewardFunctionConfig], *, section: str = SECTION, prefix: str = "") -> None:
        """Loads every function. section: where they stand in the configuration. prefix: of their labels. Raises
        ValueError naming `SECTION[i]` for what cannot be loaded."""
        if not specs:
            raise ValueError(f"`{section}` is empty; give at least one, such as path math")
        self.labels = tuple(prefix + label for label in labels(specs, section))
        self._weights = [spec.weight for spec in specs]
        self._wrong = [spec.wrong for spec in specs]
        self._functions = [load(spec, index=index, section=section) for index, spec in enumerate(specs)]

    @property
    def reads_last(self) -> int | None:
        """Returns how many characters at the end of a solution the functions look at; None: all."""
        limits = [function.reads_last for function in self._functions]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    @property
    def runs_programs(self) -> bool:
        """Returns whether a function runs programs of the model, in the sandbox."""
        return any(function.runs_programs for function in self._functions)

    @property
    def digest(self) -> str:
        """Returns the digest of the files that the functions are in: all workers of a run must agree on it."""
        return " ".join(function.digest for function in self._functions)

    def canaries(self) -> list[tuple[str, Canary]]:
        """Returns every known answer with the label of the function that it is for; none of an async function, whose
        answers depend on others."""
        return [
            (label, canary)
            for label, function in zip(self.labels, self._functions, strict=True)
            for canary in function.canaries
            if not function.asynchronous
        ]

    def without_canary(self) -> list[str]:
        """Returns the labels of the functions without known answers."""
        known = {label for label, _ in self.canaries()}
        return [label for label in self.labels if label not in known]

    def asynchronous(self) -> Iterator[tuple[str, LoadedFunction]]:
        """Yields the async functions with their labels."""
        for label, function in zip(self.labels, self._functions, strict=True):
            if function.asynchronous:
                yield label, function

    def counts(self, label: str) -> bool:
        """Returns whether a function's score enters the reward, and is not only recorded."""
        return self._weights[self.labels.index(label)] != 0

    def score_alone(self, label: str, canary: Canary) -> float:
        """Returns what one function gives for one known answer."""
        function = self._functions[self.labels.index(label)]
        value = _call(label, function, "canary", canary.solution_str, canary.ground_truth, canary.extra_info)
        return _as_float(_named(label, function), "score", value["score"] if isinstance(value, dict) else value)

    def at_limit(self, failure: str) -> Score:
        """Returns the score of a response whose scoring reached the CPU or memory limit: `wrong` of each function.

        Anything milder would pay a policy for breaking the verifier.
        """
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
        """Evaluates all functions on one response. given: what the async ones gave, by label.

        parts: what each function gave, by label, before its weight. reward: the weighted sum. accuracy: the `acc` of
        the first function that gives one, else 1.0 where the first function's score is positive and 0.0 where not. A
        function that gives None or NaN finds the response unscorable: accuracy and reward are then both NaN, so that
        the filter and the advantages leave out the same responses (a function of weight 0 is only recorded). metrics:
        all other numbers that a function gives, as LABEL/KEY.

        Raises RewardFunctionError when a function raises, TypeError or ValueError when it gives no usable number.
        MemoryError passes as it is: it is the limit of the child process, which has a verdict of its own. So does
        SandboxError, a failure of the machinery that runs the model's programs.
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
    """Returns what a person is told of an exception that a function raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == function.file]
    place = (own or frames)[-1]
    return RewardFunctionError(
        f"reward function `{label}` raised {describe(error)} on data source {source!r}, at line {place.lineno} of "
        f"{Path(place.filename).name}"
    )


def _metrics(label: str, details: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers under names of the function's own. What is no number is its own business, and the count is
    bounded: every name becomes a curve."""
    found: dict[str, float] = {}
    for key, value in details.items():
        if key not in RESERVED and isinstance(value, numbers.Real | np.bool_) and len(found) < MAX_METRICS:
            try:
                number = float(value)
            except OverflowError:  # an int of the model's may have any number of digits
                continue
            if math.isfinite(number):
                found[f"{label}/{_printable(key)[:MAX_KEY_CHARS]}"] = number
    return found


def _named(label: str, function: LoadedFunction) -> str:
    return f"reward function `{label}` ({Path(function.file).name})"


def _as_float(named: str, field: str, value: Any) -> float:
    """Returns a finite number or NaN. Numbers are bool, int, float, numpy's scalars; None is NaN."""
    if value is None:
        return math.nan
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError(
            f"{named} gave a coroutine as its {field}, which nobody awaits; write it as `async def` and await what it "
            "calls"
        )
    if not isinstance(value, numbers.Real | np.bool_):
        # A text may be the model's own words, which no log shall hold.
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
    """Returns an accuracy, 0 to 1, or NaN; a mean of several may be beyond by its rounding."""
    number = _as_float(named, "acc", value)
    if not -ROUNDING <= number <= 1.0 + ROUNDING and not math.isnan(number):
        raise ValueError(
            f"{named} gave {number:g} as its acc; give 0 (wrong) to 1 (right), or None where it cannot tell"
        )
    return min(1.0, max(0.0, number)) if not math.isnan(number) else number


def _printable(prediction: Any) -> str:
    """Returns at most 300 characters of the prediction that any file and database can hold."""
    return printable(str(prediction)[:MAX_PREDICTION_CHARS])
