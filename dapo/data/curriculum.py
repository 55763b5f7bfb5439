"""Says which visits to a prompt stand and which are skipped, by how the prompt went before (`data.curriculum`).

In: the history of the prompts (`dapo.data.history`) as the trained policy made it. Out: for each prompt the chance that
a visit stands, from 0 (it is skipped) to 1. What follows from it for the draws is `dapo.data.order`'s.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dapo.config.sampling import DataConfig
from dapo.data.history import PromptHistory


class Curriculum(Protocol):
    """Stands for a rule."""

    def chances(self, history: PromptHistory, prompts: NDArray[np.int64], *, version: int) -> NDArray[np.float64]:
        """Returns the chance of each of `prompts`, by id, at policy `version`; one of them at least is above 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retire:
    """Skips a prompt for `steps` policy versions once its last `after` visits were all solved; a visit that is solved
    then sends it away again. Of the prompts at most the share `most` is away at once; what would be above it comes back
    early, that which was visited longest ago first."""

    after: int
    steps: int
    most: float

    def chances(self, history: PromptHistory, prompts: NDArray[np.int64], *, version: int) -> NDArray[np.float64]:
        """Returns 0 or 1 for each prompt; see `Curriculum`."""
        last = history.last_version[prompts]
        away = np.flatnonzero((history.solved[prompts] >= self.after) & (version <= last + self.steps))
        most = min(int(self.most * len(prompts)), len(prompts) - 1)
        newest_last = away[np.argsort(last[away], kind="stable")]
        chances = np.ones(len(prompts))
        chances[newest_last[max(0, len(away) - most) :]] = 0.0
        return chances


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighted:
    """Lets a visit stand with the chance 4 p (1 - p), at least `least`, where p is the pass rate as `samples` responses
    and two more, one of them right, would give it; a prompt without a visit is not skipped."""

    samples: int
    least: float

    def chances(self, history: PromptHistory, prompts: NDArray[np.int64], *, version: int) -> NDArray[np.float64]:
        """Returns a chance above 0 for each prompt; see `Curriculum`."""
        p = (history.pass_rate[prompts] * self.samples + 1) / (self.samples + 2)
        return np.where(history.visits[prompts] > 0, np.maximum(4 * p * (1 - p), self.least), 1.0)


def curriculum_of(cfg: DataConfig, samples: int) -> Curriculum | None:
    """Returns the rule of `data.curriculum`; None for `uniform`, which skips nothing. samples: responses per group."""
    if cfg.curriculum == "retire":
        return Retire(after=cfg.retire_after, steps=cfg.retire_steps, most=cfg.max_retired)
    if cfg.curriculum == "weighted":
        return Weighted(samples=samples, least=cfg.min_weight)
    return None
