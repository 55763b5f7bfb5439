"""Curriculum rules (`data.curriculum`): for each prompt, the chance that a visit takes place, from 0 (always skipped)
to 1."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dapo.config.sampling import DataConfig
from dapo.data.history import PromptHistory

MAX_RETIRED = 0.9  # share of a source's prompts that `retire` skips at once


class Curriculum(Protocol):
    def chances(self, history: PromptHistory, prompts: NDArray[np.int64], *, version: int) -> NDArray[np.float64]:
        """Returns the chance of each of `prompts` (ids) at policy `version`. At least one chance is above 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retire:
    """Skips a prompt for `steps` policy versions after its last `after` visits were all solved. If the next visit is
    solved too, the prompt is skipped again. At most the share `most` of the prompts is skipped at once; above that, the
    prompts with the oldest last visit return early."""

    after: int
    steps: int
    most: float

    def chances(self, history: PromptHistory, prompts: NDArray[np.int64], *, version: int) -> NDArray[np.float64]:
        last = history.last_version[prompts]
        away = np.flatnonzero((history.solved[prompts] >= self.after) & (version <= last + self.steps))
        most = min(int(self.most * len(prompts)), len(prompts) - 1)
        newest_last = away[np.argsort(last[away], kind="stable")]
        chances = np.ones(len(prompts))
        chances[newest_last[max(0, len(away) - most) :]] = 0.0
        return chances


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighted:
    """Chance 4 p (1 - p), at least `least`. p is the pass rate smoothed with two extra responses, one of them correct
    (`samples` + 2 in total). A prompt without a visit is not skipped."""

    samples: int
    least: float

    def chances(self, history: PromptHistory, prompts: NDArray[np.int64], *, version: int) -> NDArray[np.float64]:
        p = (history.pass_rate[prompts] * self.samples + 1) / (self.samples + 2)
        return np.where(history.visits[prompts] > 0, np.maximum(4 * p * (1 - p), self.least), 1.0)


def curriculum_of(cfg: DataConfig, samples: int) -> Curriculum | None:
    """samples: responses per group. Returns None for `uniform`."""
    if cfg.curriculum == "retire":
        return Retire(after=cfg.retire_after, steps=cfg.retire_steps, most=MAX_RETIRED)
    if cfg.curriculum == "weighted":
        return Weighted(samples=samples, least=cfg.min_weight)
    return None
