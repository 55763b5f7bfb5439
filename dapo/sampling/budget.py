"""Limits the draws for one update. The error for a spent budget has rates, pass rates, and what to change."""

import math
from collections import Counter

from dapo.algorithm.fate import DROPPED
from dapo.algorithm.outcome import ALL_CORRECT, ALL_WRONG, OUTCOMES, UNSCORABLE
from dapo.types import Group

FAILED = "failed"  # unscorable because the responses failed
REMEDIES: dict[str, str] = {fate: fate.remedy for fate in DROPPED} | {
    FAILED: "`rollout.function` fails for too many responses: the warnings say why; mend it, or give it more time "
    "(`rollout.function.timeout_s`)",
}
FEW = 0.05  # share of responses without a verdict that is no sign of a faulty function
BINS = 4  # of pass rates strictly between 0 and 1
# Without `max_draws`, the search ends after this many generation batches and groups in a row without a usable one. With
# one usable draw in 100, that happens by chance once in 20,000 times.
BARREN_BATCHES, BARREN_GROUPS = 20, 1000


class BudgetExhausted(RuntimeError):
    """One update spent its whole budget of draws without a full batch."""


class Budget:
    """Counts the draws of one update, and limits them. drawn: draws started for it. drawn_before: draws of the next
    update that an earlier process started and that are not drawn again. stale: draws returned to the stream before it
    because they were too old."""

    def __init__(self, *, max_draws: int, gen_batch: int, train_partial: bool) -> None:
        """max_draws: limit for one update; 0: none, but a search that finds nothing ends. gen_batch: draws per
        generation batch. train_partial: train on the groups found when the budget is spent."""
        self._max_draws = max_draws
        self._barren_at = max(BARREN_BATCHES * gen_batch, BARREN_GROUPS)
        self._train_partial = train_partial
        self.drawn_before = 0
        self.open(stale=0)

    def open(self, *, stale: int) -> None:
        self.drawn, self.drawn_before = self.drawn_before, 0
        self.stale = stale
        self._barren = 0  # groups since the last usable one
        self._outcomes: Counter[str] = Counter()
        self._fates: Counter[str] = Counter()
        self._bins: Counter[int] = Counter()
        self._responses = self._unscored = self._silent = self._wrong = 0

    def counted(self, running: int) -> int:
        """Counts the ended draws of this or the next update. running: the others, which a resumed run starts again."""
        return self.drawn + self.drawn_before - running

    @property
    def left(self) -> float:
        if self._max_draws:
            return self._max_draws - self.drawn
        return 0 if self._barren >= self._barren_at else math.inf

    def end(self, *, usable: int, wanted: int) -> int:
        """Returns the number of groups to train on when the budget is spent. Raises BudgetExhausted if there is none,
        or fewer than wanted and only a full batch is allowed."""
        if usable and self._train_partial:
            return usable
        error = BudgetExhausted(self._explain(usable=usable, wanted=wanted))
        self.drawn = 0  # a resumed run has a full budget
        raise error

    def add(self, group: Group, outcome: str, fate: str) -> None:
        self._outcomes[outcome] += 1
        accuracies = group.accuracies
        unscored = len(group.scores) - len(accuracies)
        self._responses += len(group.scores)
        failed = sum(one.failed for one in group.responses)
        self._unscored += unscored
        self._silent += unscored - failed
        self._wrong += sum(accuracy < 1 for accuracy in accuracies)
        cause = fate
        if fate in (UNSCORABLE, ALL_CORRECT, ALL_WRONG) and unscored:  # with all scores it might have been mixed
            cause = FAILED if 2 * failed > unscored else UNSCORABLE
        self._fates[cause] += 1
        self._barren = self._barren + 1 if fate in REMEDIES else 0
        if accuracies:
            self._bins[_bin(sum(accuracies) / len(accuracies))] += 1

    def _explain(self, *, usable: int, wanted: int) -> str:
        scored = max(1, self._outcomes.total())
        shares = ", ".join(f"{name.replace('_', ' ')} {self._outcomes[name] / scored:.0%}" for name in OUTCOMES)
        most = max(REMEDIES, key=lambda name: self._fates[name])
        if most == ALL_CORRECT and self._silent > max(self._wrong, FEW * self._responses):
            most = UNSCORABLE  # most answers that are not right have no verdict, as if a `return` were missing
        barren = "" if self._max_draws else f" (none among the last {self._barren})"
        more = "raise `filter_groups.max_num_gen_batches`, " if self._max_draws else ""
        return (
            f"{self.drawn} draws for one update, and {usable} of the {wanted} usable groups that it needs{barren}: "
            f"{shares}, stale {self.stale / max(1, self.drawn):.0%}; responses without a verdict "
            f"{self._unscored / max(1, self._responses):.0%}; groups by pass rate: {self._histogram()}\n"
            f"{REMEDIES[most]}; or {more}lower `data.train_batch_size`, or set "
            "`filter_groups.on_budget=train_partial`; the groups accepted so far are kept for the next run"
        )

    def _histogram(self) -> str:
        edges = [f"{edge / BINS:g}" for edge in range(BINS + 1)]
        between = [f"{low}..{high}" for low, high in zip(edges, edges[1:], strict=False)]
        names = ["0", *between, "1"]
        return ", ".join(f"{name}: {self._bins[number]}" for number, name in enumerate(names))


def _bin(rate: float) -> int:
    if rate <= 0:
        return 0
    return BINS + 1 if rate >= 1 else 1 + min(BINS - 1, int(rate * BINS))
