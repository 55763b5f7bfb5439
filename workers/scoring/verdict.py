"""What becomes of one response in a reward worker: a child's reply, or the end of the child, as a `Verdict`."""

import math
from dataclasses import dataclass, replace
from typing import Any

from dapo.types import Score

LIMIT_REACHED = {
    "cpu": "its scoring reached `reward.limits.cpu_s`",
    "memory": "its scoring reached `reward.limits.memory_bytes`",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Made by `workers.scoring.children`, consumed by the reward pool.

    score: of NaN where there is none. detail: why not, for a person. cpu_s: of the child, NaN where that is unknown;
    wall_s: from hand-over to reply.
    """

    score: Score
    detail: str
    cpu_s: float
    wall_s: float


def no_score(failure: str) -> Score:
    """Unscorable, and why."""
    return Score(accuracy=math.nan, reward=math.nan, parts={}, metrics={}, prediction="", failure=failure)


def of_reply(reply: dict[str, Any], wall_s: float) -> Verdict:
    """Of a child's words: an error of a function, or numbers and one text. Raises ValueError for other words."""
    try:
        if "error" in reply:
            score, detail = no_score("error"), str(reply["error"])
        else:
            score, detail = _score(reply), ""
        return Verdict(score=score, detail=detail, cpu_s=float(reply["cpu_s"]), wall_s=wall_s)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"a child's reply is no verdict ({type(error).__name__}: {error})") from None


def of_limit(failure: str, at_limit: dict[str, Any], cpu_s: float, wall_s: float) -> Verdict:
    """failure: a key of `LIMIT_REACHED`. at_limit: the score of a response that reached it."""
    score = replace(_score(at_limit), failure=failure)
    spent = cpu_s if failure == "cpu" else math.nan
    return Verdict(score=score, detail=LIMIT_REACHED[failure], cpu_s=spent, wall_s=wall_s)


def of_end(failure: str, detail: str, wall_s: float) -> Verdict:
    """The child ended and the response is innocent, or nobody knows better."""
    return Verdict(score=no_score(failure), detail=detail, cpu_s=math.nan, wall_s=wall_s)


def _score(reply: dict[str, Any]) -> Score:
    return Score(
        accuracy=float(reply["accuracy"]),
        reward=float(reply["reward"]),
        parts={str(name): float(value) for name, value in reply["parts"].items()},
        metrics={str(name): float(value) for name, value in reply["metrics"].items()},
        prediction=str(reply["prediction"]),
        failure=str(reply["failure"]),
    )
