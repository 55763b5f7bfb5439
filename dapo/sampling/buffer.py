"""The oversampling buffer: which draws to generate, which groups to keep, when a step has enough (DESIGN section 4).

    take ─▶ (engines) ─▶ generated ─▶ (verifier) ─▶ add ─▶ full? ─▶ close ─▶ a batch of usable groups
      ▲                                                               │
      └──────────────── draws that go back to the stream ◀────────────┘

Pure: it knows neither Ray nor clocks, so the same code runs against real engines and against `dapo.simulate`. Every
draw and token is accounted for by `dapo.sampling.ledger`; how many draws to start is `dapo.sampling.demand`'s.
"""

import copy
from collections import Counter
from collections.abc import Collection, Iterable

from dapo.config.schema import Config
from dapo.sampling.budget import Budget
from dapo.sampling.buffer_state import BufferState
from dapo.sampling.demand import Demand, UsableRate
from dapo.sampling.draw_queue import DrawQueue
from dapo.sampling.ledger import BUFFERED, IN_GENERATION, IN_REWARD, STALE, STOPPED, SURPLUS, TO_RETRY, Ledger
from dapo.sampling.outcome import ALL_CORRECT, ALL_WRONG, MIXED, classify
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
        self._usable = {MIXED} if filter_groups else {MIXED, ALL_CORRECT, ALL_WRONG}
        self._min_scored = min_scored
        self._in_order = admission == DRAW_ORDER
        self._max_staleness = max_staleness
        self._total_steps = total_steps
        self.rate = UsableRate(certain=not filter_groups)
        self.ledger = Ledger()
        self.version = 0  # of the policy that the engines serve; set after each weight sync
        self.collecting = False
        self._update = 0  # policy version that the next batch is trained from
        self._closed: list[tuple[Group, int]] = []  # the batch of the update under way, and what was dropped with it
        self._wanted = train_batch_size  # groups of this step; fewer when the budget ends and `train_partial` holds
        self._queue = DrawQueue()
        self._started: dict[int, int] = {}  # policy version at the start of each draw that is in flight or finished
        self._groups: dict[int, Group] = {}  # finished, waiting for their turn
        self._outcomes: dict[int, str] = {}
        self._in_reward: set[int] = set()
        self._known = 0  # usable ones among the finished
        self._frontier = 0  # in draw order: all draws before it are used up or finished
        self._ready = 0  # usable ones before the frontier, or finished ones under `completion`
        self.cursor = 0  # in draw order: all draws before it are used up
        self._budget = Budget(max_draws=max_draws, train_partial=on_budget == "train_partial")
        self._stale = 0  # draws that the last step sent back because they were too old
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
        assert not self._closed, "open() before the closed batch was trained on"
        self.version = self._update = version
        self.collecting = True
        self._wanted = self._batch
        self._budget.open(stale=self._stale)
        self._advance()

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
        # Draws that went back leave gaps in the order; what waits behind a gap does not make the batch full.
        gaps = len(self._queue.gaps) if self._in_order and self.collecting and not self.full else 0
        count = max(count, gaps)
        left = max(gaps, self._budget.left)
        if left <= 0 and self.collecting and not self.full and self.in_flight == 0:
            self._wanted = self._budget.end(usable=self._known, wanted=self._batch)
            self._advance()
        count = int(min(count, left, self._max_in_flight - self.in_flight))
        return [self._start() for _ in range(count if room is None else min(count, room))]

    def _batches_ahead(self) -> int:
        """Updates that may train on what starts now."""
        last = self.version + self._max_staleness
        if self._total_steps:
            last = min(last, self._total_steps - 1)
        return max(0, last - self._update + 1)

    def _start(self) -> int:
        index = self._queue.pop()
        self._started[index] = self.version
        self._budget.drawn += 1
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
        self._budget.add(group, outcome)
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
        """Ends the step: the batch leaves the buffer, and with it what was dropped up to its last group.

        Until `trained`, both still count as buffered and go into a checkpoint: a failed update loses no group.
        """
        assert self.collecting and self.full, "close() before the batch is full"
        self.collecting = False
        self._update += 1
        used = self._used_up()
        outcomes = {index: self._outcomes[index] for index in used}
        self._closed = [(self._groups[index], self._started[index]) for index in used]
        self._forget(used)
        late = self._late()
        collected = Collected(
            drawn=tuple(group for group, _ in self._closed),
            groups=tuple(group for group, _ in self._closed if outcomes[group.draw.index] in self._usable),
            outcomes=Counter(outcomes.values()),
            returned=late,
            unfinished=frozenset(i for i in late if i not in self._outcomes and i not in self._in_reward),
            lost=tuple(self._groups[index] for index in late if index in self._groups),
        )
        self._send_back(late)
        self._stale = len(late) if self._max_staleness else 0
        self._recount(cursor=self._frontier)
        self.rate.end_step(usable=len(collected.groups), draws=len(used))
        self.ledger.check(self._held())
        return collected

    def trained(self) -> None:
        """The update with the closed batch is done."""
        for group, _ in self._closed:
            outcome = classify(group, self._min_scored)
            if outcome in self._usable:
                self.ledger.train(group.draw.index)
            else:
                self.ledger.drop(group.draw.index, outcome)
        self._closed = []
        self.ledger.check(self._held())

    def _used_up(self) -> list[int]:
        """Finished draws that this step uses up, in draw order."""
        if self._in_order:
            return list(range(self.cursor, self._frontier))
        usable = [index for index, outcome in self._outcomes.items() if outcome in self._usable][: self._wanted]
        dropped = [index for index, outcome in self._outcomes.items() if outcome not in self._usable]
        return sorted(usable + dropped)

    def _late(self) -> tuple[int, ...]:
        """Draws that the next update may not train on: they started at too old a version. At staleness 0, all."""
        oldest = self._update - self._max_staleness
        return tuple(sorted(index for index, version in self._started.items() if version < oldest))

    def _send_back(self, indices: Collection[int]) -> None:
        for index in indices:
            self.ledger.retry(index, self._lost)
        self._forget(indices)
        self._queue.put_back(indices)

    def held(self) -> list[tuple[Group, int]]:
        """Finished groups that wait for their turn or for the update under way to end, each with the policy version at
        its start, in draw order."""
        waiting = [(group, self._started[index]) for index, group in self._groups.items()]
        return sorted(self._closed + waiting, key=lambda entry: entry[0].draw.index)

    def aborted(self, tokens: int) -> None:
        """What the unfinished ones of the returned draws had generated, known once the engines have ended them."""
        self.ledger.aborted(tokens, self._lost)

    def state(self) -> BufferState:
        """For the checkpoint. Draws in flight are as if they had gone back to the stream."""
        running = [index for index in self._started if index not in self._outcomes]
        queue = self._queue.copy()
        queue.put_back(running)
        ledger = copy.deepcopy(self.ledger)
        for index in running:
            ledger.retry(index, STOPPED)
        return BufferState(
            reached=queue.reached, next=queue.fresh, retry=queue.gaps, rate=self.rate.state(), ledger=ledger.state()
        )

    def restore(self, state: BufferState, held: Iterable[tuple[Group, int]], *, version: int) -> None:
        """From a checkpoint of policy `version`, into an unused buffer; groups that are too old are drawn again."""
        self.version = self._update = version
        self.rate.restore(state.rate)
        self._queue = DrawQueue(fresh=state.next, reached=state.reached, gaps=state.retry)
        tokens: dict[int, int] = {}
        for group, started in held:
            tokens[group.draw.index] = group.num_tokens
            self._started[group.draw.index] = started
            self._keep(group)
        self.ledger.restore(state.ledger, to_retry=self._queue.to_retry, buffered=tokens)
        self._send_back(self._late())
        self._recount(cursor=min([self._queue.fresh, *self._queue.gaps, *self._groups]))
        self.ledger.check(self._held())

    def _recount(self, *, cursor: int) -> None:
        self._known = sum(outcome in self._usable for outcome in self._outcomes.values())
        self._ready = 0 if self._in_order else self._known
        self.cursor = self._frontier = cursor
        self._advance()

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
            BUFFERED: len(self._outcomes) + len(self._closed),
            TO_RETRY: len(self._queue.to_retry),
        }
