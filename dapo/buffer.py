"""The oversampling buffer: which draws to generate, which groups to keep, when a step has enough (DESIGN section 4).

In: the cursor of the stream and scored groups, in any order. Out: how many more draws to start, and, once the first
`train_batch_size` usable groups in draw order are known, exactly these. Pure: it knows neither Ray nor clocks.
"""

import math
from collections import Counter
from dataclasses import dataclass

from dapo.types import Group

MIXED = "mixed"
ALL_CORRECT = "all_correct"
ALL_WRONG = "all_wrong"
UNSCORABLE = "unscorable"


class BudgetExhausted(RuntimeError):
    """One update drew its whole budget without a full batch."""


def classify(group: Group) -> str:
    """MIXED, ALL_CORRECT, ALL_WRONG or UNSCORABLE, from raw accuracies and never from shaped rewards (Eq. 11).

    Fewer than two scorable responses make a group unscorable. Equal accuracies count as all correct above 0.5.
    """
    accuracies = [score.accuracy for score in group.scores if not math.isnan(score.accuracy)]
    if len(accuracies) < 2:
        return UNSCORABLE
    if min(accuracies) != max(accuracies):
        return MIXED
    return ALL_CORRECT if accuracies[0] > 0.5 else ALL_WRONG


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What a step trains on. Made by `OversamplingBuffer.close`, consumed by the trainer.

    drawn: every group up to the last one needed, in draw order. groups: those of them to train on. outcomes: draws per
    outcome. surplus: draws beyond the last one needed, which go back to the stream.
    """

    drawn: tuple[Group, ...]
    groups: tuple[Group, ...]
    outcomes: Counter[str]
    surplus: range


class OversamplingBuffer:
    """Admission by draw order at staleness 0: a step trains on the first usable groups after the cursor, whatever
    finished first, so that a run depends on its seed and not on timing."""

    def __init__(
        self, *, train_batch_size: int, gen_batch_size: int, max_num_gen_batches: int, filter_groups: bool
    ) -> None:
        """filter_groups false keeps every group that can be scored."""
        self._batch = train_batch_size
        self._in_flight_bound = gen_batch_size
        self._budget = max_num_gen_batches * gen_batch_size
        self._usable = {MIXED} if filter_groups else {MIXED, ALL_CORRECT, ALL_WRONG}
        self.cursor = 0  # the next draw that no step has consumed
        self.rate = UsableRate(certain=not filter_groups)
        self._next = 0
        self._groups: dict[int, Group] = {}
        self._outcomes: dict[int, str] = {}

    def open(self, cursor: int) -> None:
        """Starts a step whose first draw is `cursor`."""
        self.cursor = self._next = cursor
        self._groups.clear()
        self._outcomes.clear()

    @property
    def in_flight(self) -> int:
        """Draws started and not yet known."""
        return self._next - self.cursor - len(self._outcomes)

    @property
    def num_usable(self) -> int:
        """Groups known to be usable, in order or not."""
        return sum(outcome in self._usable for outcome in self._outcomes.values())

    def take(self) -> range:
        """Indices of the draws to start now; the caller starts them all.

        Raises:
            BudgetExhausted: nothing is in flight, the batch is not full, and the budget is drawn.
        """
        missing = self._batch - self.num_usable
        count = self.rate.draws_for(missing) - self.in_flight
        count = min(count, self._in_flight_bound - self.in_flight)
        if self._budget:
            count = min(count, self.cursor + self._budget - self._next)
            if count <= 0 and missing > 0 and self.in_flight == 0:
                raise BudgetExhausted(self._explain_budget())
        first = self._next
        self._next += max(count, 0)
        return range(first, self._next)

    def add(self, group: Group) -> None:
        """Takes the scored group of a draw that `take` gave out."""
        self._groups[group.draw.index] = group
        self._outcomes[group.draw.index] = classify(group)

    @property
    def last_needed(self) -> int | None:
        """d*: the draw of the last group that the batch needs, once all draws up to it are known."""
        usable = 0
        for index in range(self.cursor, self._next):
            outcome = self._outcomes.get(index)
            if outcome is None:
                return None
            usable += outcome in self._usable
            if usable == self._batch:
                return index
        return None

    def close(self) -> Collected:
        """Ends the step at d*: the cursor becomes d* + 1 and every later draw goes back to the stream."""
        last = self.last_needed
        assert last is not None, "close() before the batch is full"
        used = range(self.cursor, last + 1)
        groups = tuple(self._groups[i] for i in used if self._outcomes[i] in self._usable)
        outcomes = Counter(self._outcomes[i] for i in used)
        self.rate.observe(usable=len(groups), draws=len(used))
        self.cursor = last + 1
        drawn = tuple(self._groups[index] for index in used)
        return Collected(drawn=drawn, groups=groups, outcomes=outcomes, surplus=range(last + 1, self._next))

    def _explain_budget(self) -> str:
        drawn = len(self._outcomes)
        counts = Counter(self._outcomes.values())
        shares = ", ".join(f"{name} {counts[name] / drawn:.0%}" for name in (ALL_CORRECT, ALL_WRONG, UNSCORABLE))
        return (
            f"{drawn} draws gave {self.num_usable} of the {self._batch} mixed groups that an update needs ({shares}); "
            "all correct: take harder prompts; all wrong: easier prompts, a stronger model, or look at the reward "
            "function; or raise `filter_groups.max_num_gen_batches`, or lower `data.train_batch_size`"
        )


class UsableRate:
    """Running estimate of the share of draws that give a usable group, over about the last `MEMORY` steps."""

    MEMORY = 4.0
    QUANTILE_Z = 0.84  # about 80 %: the refill of an unlucky step costs less than always generating for it

    def __init__(self, *, certain: bool) -> None:
        self._usable, self._draws = (1.0, 1.0) if certain else (1.0, 2.0)

    @property
    def value(self) -> float:
        """The estimate, in (0, 1]."""
        return self._usable / self._draws

    def observe(self, *, usable: int, draws: int) -> None:
        """Adds the outcome of one step."""
        keep = 1.0 - 1.0 / self.MEMORY
        self._usable = keep * self._usable + usable
        self._draws = keep * self._draws + draws

    def draws_for(self, groups: int) -> int:
        """Upper quantile of the draws that it takes to see `groups` more usable ones (negative binomial)."""
        if groups <= 0:
            return 0
        rate = self.value
        mean = groups / rate
        deviation = math.sqrt(groups * (1.0 - rate)) / rate
        return math.ceil(mean + self.QUANTILE_Z * deviation - 1e-9)

    def state(self) -> list[float]:
        """For the checkpoint."""
        return [self._usable, self._draws]

    def restore(self, state: list[float]) -> None:
        """From the checkpoint."""
        self._usable, self._draws = state
