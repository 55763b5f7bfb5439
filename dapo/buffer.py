"""The oversampling buffer: which draws to generate, which groups to keep, when a step has enough (DESIGN section 4).

    take ─▶ (engines) ─▶ generated ─▶ (verifier) ─▶ add ─▶ full? ─▶ close ─▶ a batch of usable groups
      ▲                                                               │
      └──────────────── draws that go back to the stream ◀────────────┘

Pure: it knows neither Ray nor clocks, so the same code runs against real engines and against `dapo.simulate`. Every
draw and token is accounted for by `dapo.ledger`; how many draws to start is `dapo.demand`'s.
"""

import copy
import heapq
from collections import Counter
from collections.abc import Iterable

from dapo.budget import BudgetExhausted, StepTally
from dapo.buffer_state import BufferState, folded
from dapo.config import Config
from dapo.demand import Demand, UsableRate
from dapo.ledger import BUFFERED, IN_GENERATION, IN_REWARD, STALE, STOPPED, SURPLUS, TO_RETRY, Ledger
from dapo.outcome import ALL_CORRECT, ALL_WRONG, MIXED, classify
from dapo.types import Collected, Group

DRAW_ORDER = "draw_order"
COMPLETION = "completion"


class OversamplingBuffer:
    """Collects `train_batch_size` usable groups per update.

    Admission in draw order: a step trains on the first usable groups after the cursor, whatever finished first, so
    that training is not biased towards what is generated fast. `completion` takes what finishes first.

    max_staleness 0: what a step does not use goes back to the stream, and a run depends on its seed alone. Above, draws
    in flight and surplus groups live on: a draw that starts at policy version v is trained at the latest by the update
    from version v + max_staleness, and none starts that is likely to miss it.
    """

    def __init__(
        self,
        *,
        train_batch_size: int,
        max_in_flight: int,
        max_draws: int = 0,
        filter_groups: bool = True,
        min_scored: int = 2,
        admission: str = DRAW_ORDER,
        on_budget: str = "fail",
        max_staleness: int = 0,
        total_steps: int = 0,
    ) -> None:
        """max_in_flight: draws. max_draws: bound for one update, 0 = none; on_budget: `fail`, or `train_partial` with
        what there is. filter_groups false keeps every group that can be scored. total_steps: updates of the run, for
        which alone is generated ahead; 0 = no end."""
        self._batch = train_batch_size
        self._max_in_flight = max_in_flight
        self._max_draws = max_draws
        self._usable = {MIXED} if filter_groups else {MIXED, ALL_CORRECT, ALL_WRONG}
        self._min_scored = min_scored
        self._in_order = admission == DRAW_ORDER
        self._train_partial = on_budget == "train_partial"
        self._max_staleness = max_staleness
        self._total_steps = total_steps
        self.rate = UsableRate(certain=not filter_groups)
        self.ledger = Ledger()
        self.version = 0
        self.collecting = False
        self._wanted = train_batch_size  # groups of this step; fewer when the budget ends and `train_partial` holds
        self._next = 0  # no draw from here on is in flight, finished or used up
        self._reached = 0  # no draw from here on was ever started
        self._retry: list[int] = []  # a heap of draws that the stream has to start again, before new ones
        self._started: dict[int, int] = {}  # policy version at the start of each draw that is in flight or finished
        self._groups: dict[int, Group] = {}  # finished, waiting for their turn
        self._outcomes: dict[int, str] = {}
        self._in_reward: set[int] = set()
        self._known = 0  # usable ones among the finished
        self._frontier = 0  # in draw order: all draws before it are used up or finished
        self._ready = 0  # usable ones before the frontier, or finished ones under `completion`
        self.cursor = 0  # in draw order: all draws before it are used up
        self._tally = StepTally()
        self._lost = SURPLUS if max_staleness == 0 else STALE  # why a draw goes back to the stream

    @classmethod
    def of(cls, cfg: Config) -> "OversamplingBuffer":
        """From `data` and `filter_groups`."""
        filtering = cfg.filter_groups
        return cls(
            train_batch_size=cfg.data.train_batch_size,
            max_in_flight=cfg.data.gen_batch_size,
            max_draws=filtering.max_num_gen_batches * cfg.data.gen_batch_size,
            filter_groups=filtering.enable,
            min_scored=filtering.min_scored,
            admission=filtering.admission,
            on_budget=filtering.on_budget,
            max_staleness=filtering.max_staleness,
            total_steps=cfg.trainer.total_steps,
        )

    def open(self, version: int) -> None:
        """Starts to collect for the update from policy `version`, which the engines serve from now on."""
        self.version = version
        self.collecting = True
        self._wanted = self._batch
        stale = self._tally.stale
        self._tally = StepTally()
        self._tally.stale = stale

    @property
    def in_flight(self) -> int:
        """Draws started and not finished."""
        return len(self._started) - len(self._outcomes)

    def take(self, room: int | None = None) -> list[int]:
        """Indices of the draws to start now; the caller starts them all. room: what else bounds their number.

        Raises:
            BudgetExhausted: nothing is in flight, the batch is not full, and the budget is drawn.
        """
        demand = Demand(known=self._known, open=self.in_flight)
        count = self.rate.missing(self._batch, demand) if self.collecting else 0
        if self._max_staleness:
            count = max(count, self.rate.allowed(self._batches_ahead() * self._batch, demand))
        count = min(count, self._max_in_flight - self.in_flight)
        if room is not None:
            count = min(count, room)
        if self._max_draws:
            left = self._max_draws - self._tally.drawn
            count = min(count, left)
            if left <= 0 and self.collecting and not self.full and self.in_flight == 0:
                self._end_budget()
        return [self._start() for _ in range(count)]

    def _batches_ahead(self) -> int:
        """That may use what starts now: this update's, if it still collects, and those after it."""
        after = self._max_staleness
        if self._total_steps:
            after = max(0, min(after, self._total_steps - 1 - self.version))
        return after + self.collecting

    def _end_budget(self) -> None:
        if not self._train_partial or self._known == 0:
            raise BudgetExhausted(self._tally.explain(usable=self._known, wanted=self._batch))
        self._wanted = self._known
        self._advance()

    def _start(self) -> int:
        if self._retry:
            index = heapq.heappop(self._retry)
        else:
            index = self._next
            self._next += 1
            self._reached = max(self._reached, self._next)
        self._started[index] = self.version
        self._tally.drawn += 1
        self.ledger.start(index)
        return index

    def generated(self, index: int, tokens: int) -> None:
        """All responses of a draw are there; the verdicts are not."""
        if index in self._started:
            self._in_reward.add(index)
            self.ledger.generated(index, tokens)

    def add(self, group: Group) -> None:
        """Takes the scored group of a draw that `take` gave out; one that went back to the stream is ignored."""
        index = group.draw.index
        if index not in self._started:
            return
        self._in_reward.discard(index)
        self.ledger.buffer(index)
        outcome = self._keep(group)
        self._tally.add(group, outcome)
        self.rate.observe(outcome in self._usable)
        self._advance()

    def _keep(self, group: Group) -> str:
        outcome = classify(group, self._min_scored)
        self._groups[group.draw.index] = group
        self._outcomes[group.draw.index] = outcome
        self._known += outcome in self._usable
        if not self._in_order:
            self._ready = self._known
        return outcome

    def _advance(self) -> None:
        """Moves the frontier over what is finished, at most to the end of a batch."""
        while self._in_order and self._ready < self._wanted and self._frontier in self._outcomes:
            self._ready += self._outcomes[self._frontier] in self._usable
            self._frontier += 1

    @property
    def full(self) -> bool:
        """Whether the batch is known: in draw order, once every draw up to its last group is."""
        return self._ready >= self._wanted

    def close(self) -> Collected:
        """Ends the step: the batch leaves the buffer, and with it what was dropped up to its last group."""
        assert self.collecting and self.full, "close() before the batch is full"
        self.collecting = False
        used = self._used_up()
        groups = tuple(self._groups[index] for index in used if self._outcomes[index] in self._usable)
        returned = self._late(used)
        collected = Collected(
            drawn=tuple(self._groups[index] for index in used),
            groups=groups,
            outcomes=Counter(self._outcomes[index] for index in used),
            returned=returned,
            unfinished=frozenset(i for i in returned if i not in self._outcomes and i not in self._in_reward),
        )
        for index in used:
            if self._outcomes[index] in self._usable:
                self.ledger.train(index)
            else:
                self.ledger.drop(index, self._outcomes[index])
        for index in returned:
            self.ledger.retry(index, self._lost)
        self._tally.stale = len(returned) if self._max_staleness else 0
        self._forget((*used, *returned))
        self._retry, self._next = folded([*self._retry, *returned], self._next)
        self._known = self._ready = sum(outcome in self._usable for outcome in self._outcomes.values())
        if self._in_order:
            self.cursor = self._frontier
            self._ready = 0
            self._advance()
        self.rate.end_step(usable=len(groups), draws=len(used))
        self.ledger.check(self._held())
        return collected

    def _used_up(self) -> list[int]:
        """Finished draws that this step uses up, in draw order."""
        if self._in_order:
            return [index for index in range(self.cursor, self._frontier)]
        usable = [index for index, outcome in self._outcomes.items() if outcome in self._usable][: self._wanted]
        dropped = [index for index, outcome in self._outcomes.items() if outcome not in self._usable]
        return sorted(usable + dropped)

    def _late(self, used: list[int]) -> tuple[int, ...]:
        """Draws that the next update may not train on: they started at too old a version. At staleness 0, all."""
        oldest = self.version + 1 - self._max_staleness
        gone = set(used)
        return tuple(
            sorted(index for index, version in self._started.items() if version < oldest and index not in gone)
        )

    def held(self) -> list[tuple[Group, int]]:
        """Finished groups that wait for their turn, each with the policy version at its start, in draw order."""
        return [(self._groups[index], self._started[index]) for index in sorted(self._groups)]

    def aborted(self, tokens: int) -> None:
        """What the unfinished ones of the returned draws had generated, known once the engines have ended them."""
        self.ledger.aborted(tokens, self._lost)

    def state(self) -> BufferState:
        """For the checkpoint. Draws in flight are as if they had gone back to the stream."""
        self.ledger.check(self._held())
        running = [index for index in self._started if index not in self._outcomes]
        retry, following = folded([*self._retry, *running], self._next)
        ledger = copy.deepcopy(self.ledger)
        for index in running:
            ledger.retry(index, STOPPED)
        return BufferState(
            reached=self._reached, next=following, retry=retry, rate=self.rate.state(), ledger=ledger.state()
        )

    def restore(self, state: BufferState, held: Iterable[tuple[Group, int]], *, version: int) -> None:
        """From a checkpoint of policy `version`, into an unused buffer; groups that are too old are drawn again."""
        self.rate.restore(state.rate)
        groups = {group.draw.index: (group, started) for group, started in held}
        to_retry = [*state.retry, *range(state.next, state.reached)]
        self.ledger.restore(
            state.ledger, to_retry=to_retry, buffered={i: group.num_tokens for i, (group, _) in groups.items()}
        )
        late = [index for index, (_, started) in groups.items() if started < version - self._max_staleness]
        for index in late:
            self.ledger.retry(index, STALE)
            del groups[index]
        self._reached = state.reached
        self._retry, self._next = folded([*state.retry, *late], state.next)
        for index, (group, started) in groups.items():
            self._started[index] = started
            self._keep(group)
        self.cursor = self._frontier = min([self._next, *self._retry, *groups])
        self._advance()
        self.ledger.check(self._held())

    def _forget(self, indices: Iterable[int]) -> None:
        for index in indices:
            del self._started[index]
            self._groups.pop(index, None)
            self._outcomes.pop(index, None)
            self._in_reward.discard(index)

    def _held(self) -> dict[str, int]:
        return {
            IN_GENERATION: self.in_flight - len(self._in_reward),
            IN_REWARD: len(self._in_reward),
            BUFFERED: len(self._outcomes),
            TO_RETRY: len(self._retry) + self._reached - self._next,
        }
