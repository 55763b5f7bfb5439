"""Turns a child's reply, or the way the child ended, into the `Verdict` on one response."""

import math
from dataclasses import dataclass, replace
from typing import Any

from dapo.types import Score, unscorable

RETRY_PAUSE_S = 0.5  # before a retry: the cause of the failure, such as a lack of memory, may persist
MAX_METRICS = 128
MAX_FAILURES_IN_A_ROW = 128  # eight groups of 16 without a score: the scorer is broken, not the responses
WARNINGS = 3  # logged per kind of failure; then one each time their number doubles
CHANGED = "the files of `reward.functions` have changed during the run; put them back or start a new run"
LIMIT_REACHED = {
    "cpu": "its scoring reached `reward.limits.cpu_s`",
    "memory": "its scoring reached `reward.limits.memory_bytes`",
}


class CanaryError(RuntimeError):
    """Known answers get a wrong score, or other functions would score: no verdict can be trusted."""

    @classmethod
    def of_answer(cls, request: dict[str, Any], got: Any) -> "CanaryError":
        known = request["canary"]
        return cls(
            f"reward function `{request['label']}` gave {got} for a known answer whose score is {known['score']} "
            f"({ascii(known['solution_str'][-80:])}, truth {known['ground_truth']!r}); no verdict of this worker can "
            "be trusted: fix the function or its `canaries`"
        )


class ChildrenLost(RuntimeError):
    """The processes of a reward worker repeatedly fail to start; another worker may succeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The score of one response. Made by `workers.scoring.children`, consumed by the reward pool. score: NaN if there
    is none. detail: why, for the log. cpu_s: CPU seconds of the child, NaN if unknown. wall_s: seconds from request to
    reply. after_s: seconds that a server asked to wait before the next request."""

    score: Score
    detail: str
    cpu_s: float
    wall_s: float
    after_s: float = 0.0


class KnownMetrics:
    """Limits metrics to the first `MAX_METRICS` names of a run: each name becomes a curve, and a function may derive
    names from the model's text."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def keep(self, score: Score) -> Score:
        for name in score.metrics:
            if name not in self._names and len(self._names) < MAX_METRICS:
                self._names.add(name)
        if self._names.issuperset(score.metrics):
            return score
        return replace(score, metrics={name: v for name, v in score.metrics.items() if name in self._names})


def verdict_from_reply(reply: dict[str, Any], wall_s: float) -> Verdict:
    """Parses a child's reply: a function's error, or numbers and one text. Raises ValueError if it is malformed."""
    try:
        if "error" in reply:
            score, detail = unscorable("error"), str(reply["error"])
        else:
            score, detail = _score(reply), ""
        return Verdict(score=score, detail=detail, cpu_s=float(reply["cpu_s"]), wall_s=wall_s)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"a child's reply is no verdict ({type(error).__name__}: {error})") from None


def verdict_at_limit(failure: str, at_limit: dict[str, Any], cpu_s: float, wall_s: float) -> Verdict:
    """Returns the verdict at a limit. failure: a key of `LIMIT_REACHED`. at_limit: the score for it."""
    score = replace(_score(at_limit), failure=failure)
    spent = cpu_s if failure == "cpu" else math.nan
    return Verdict(score=score, detail=LIMIT_REACHED[failure], cpu_s=spent, wall_s=wall_s)


def verdict_of_failure(failure: str, detail: str, wall_s: float, after_s: float = 0.0) -> Verdict:
    """Returns an unscorable verdict: the process ended, and the response is not known to be the cause."""
    return Verdict(score=unscorable(failure), detail=detail, cpu_s=math.nan, wall_s=wall_s, after_s=after_s)


def is_told(count: int) -> bool:
    """Whether a failure is logged. count: failures of its kind so far, including this one."""
    return count <= WARNINGS or count & (count - 1) == 0


def gave_nothing(score: Score) -> str:
    labels = [f"`{label}`" for label, value in score.parts.items() if math.isnan(value)]
    if labels:
        return f"reward function {', '.join(labels)} gave None or NaN as its score"
    return "the reward functions gave None or NaN as `acc`"


def remedy(failure: str) -> str:
    if failure == "away":
        return "see to the server that it asks, or raise `reward.remote.patience_s`"
    if failure == "remote":
        return (
            "see to the server that it asks, or give it more time: `reward.remote.call_timeout_s`, "
            "`reward.remote.timeout_s` and, above it, `reward.timeout_s`"
        )
    if failure == "none":
        return "have it give a number: a `return` may be missing"
    return "fix the function or raise its `reward.limits`"


def _score(reply: dict[str, Any]) -> Score:
    return Score(
        accuracy=float(reply["accuracy"]),
        reward=float(reply["reward"]),
        parts={str(name): float(value) for name, value in reply["parts"].items()},
        metrics={str(name): float(value) for name, value in reply["metrics"].items()},
        prediction=str(reply["prediction"]),
        failure=str(reply["failure"]),
    )
