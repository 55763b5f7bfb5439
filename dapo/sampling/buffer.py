"""The oversampling buffer: which draws to generate, which groups to keep, when a step has enough (DAPO Eq. 11).

    take ─▶ (engines) ─▶ generated ─▶ (verifier) ─▶ add ─▶ full? ─▶ close ─▶ a batch of usable groups
      ▲                                                               │
      └────────── draws that are returned to the stream ◀─────────────┘

It uses neither Ray nor clocks, so that the same code runs with real engines and in `dapo.simulate`. The state of each
draw is in `dapo.sampling.draws`; `dapo.sampling.demand` computes how many draws to start.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from dapo.algorithm.fate import TRAINED, Fate
from dapo.algorithm.outcome import ALL_CORRECT, ALL_WRONG, MIXED, classifier, classify
from dapo.config.schema import Config
from dapo.sampling.budget import Budget
from dapo.sampling.demand import Forecast, UsableRate
from dapo.sampling.draws import REFUSED, STALE, SURPLUS, BufferState, Draws, State
from dapo.sampling.prospects import Prospects
from dapo.types import Collected, Group

DRAW_ORDER = "draw_order"


class OversamplingBuffer:
    """Collects `train_batch_size` usable groups per update.

    Admission in draw order: a step trains on the first usable groups after the cursor, whichever finished first, so
    that training is not biased towards fast generation. `completion` takes what finishes first.

    max_staleness 0: what a step does not use is returned to the stream, and a run depends only on its seed. Above 0,
    draws in flight and surplus groups are kept: a draw that starts at policy version v is trained at the latest by the
    update from version v + max_staleness, and none starts that is likely to miss it.
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
        engines_lag: bool = False,
        total_steps: int = 0,
        has_signal: Callable[[Group], bool] = lambda group: True,
        classify: Callable[[Group, int], str] = classify,
        on_scored: Callable[[Group, int], None] = lambda group, started: None,
    ) -> None:
        """max_in_flight: draws. max_draws: limit for one update, 0 = none. on_budget: `fail`, or `train_partial` to
        train on what there is. filter_groups: false keeps every scorable group. total_steps: of the run, generation
        runs no further ahead; 0 = no end. engines_lag: tokens may be of an older version than that of the
        draw's start. has_signal: whether a mixed group can be trained on. classify:
        `dapo.algorithm.outcome.classify`, or another. on_scored: called with every group, and the policy version at its
        start."""
        self._batch, self._max_in_flight = train_batch_size, max_in_flight
        self._classify, self._min_scored = classify, min_scored
        self._has_signal = has_signal if filter_groups else lambda group: True
        self._usable = {MIXED} if filter_groups else {MIXED, ALL_CORRECT, ALL_WRONG}
        self._in_order = admission == DRAW_ORDER
        self._max_staleness, self._total_steps = max_staleness, total_steps
        self._age_by_tokens = engines_lag and max_staleness > 0
        self.rate = UsableRate(certain=not filter_groups)
        self.prospects = Prospects()
        self.draws = Draws()
        self.version = 0  # of the policy that the engines serve
        self.collecting = False
        self._on_scored = on_scored
        self._update = 0  # policy version that the next batch is trained from
        self._wanted = train_batch_size  # groups of this step; fewer if the budget is spent with `train_partial`
        self._frontier, self._ready = 0, 0  # in draw order: draws used up or scored, and usable groups among them
        self._budget = Budget(max_draws=max_draws, gen_batch=max_in_flight, train_partial=on_budget == "train_partial")
        self._stale = 0  # draws that the last step returned as too old
        self._why_back = SURPLUS if max_staleness == 0 else STALE
        self.refusals: Counter[tuple[int, int]] = Counter()  # how often each start was set aside, by (draw, version)

    @classmethod
    def of(
        cls,
        cfg: Config,
        has_signal: Callable[[Group], bool] = lambda group: True,
        on_scored: Callable[[Group, int], None] = lambda group, started: None,
    ) -> "OversamplingBuffer":
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
            engines_lag=bool(cfg.rollout.outside.listen),
            total_steps=cfg.trainer.total_steps,
            has_signal=has_signal,
            classify=classifier(cfg),
            on_scored=on_scored,
        )

    def serving(self, version: int) -> None:
        """The engines serve policy `version` from now on, and the next update starts from it."""
        self.version = self._update = version

    def open(self) -> None:
        assert not self.draws.at(State.TRAINING), "open() before the closed batch was trained on"
        self.collecting = True
        self._wanted = self._batch
        self._budget.open(stale=self._stale)
        self._advance()

    @property
    def in_flight(self) -> int:
        return self.draws.counts[State.IN_GENERATION] + self.draws.counts[State.IN_REWARD]

    @property
    def missing(self) -> int:
        """Number of draws that this batch needs beside those in flight, before other limits."""
        if not self.collecting:
            return 0
        return self.rate.missing(self._batch, usable=self.draws.usable, in_flight=self.in_flight)

    def take(self, room: int | None = None) -> list[int]:
        """Starts draws and returns their indices; the caller must generate them all. room: another limit on their
        number. Raises BudgetExhausted if nothing is in flight, the batch is not full and the budget is spent."""
        space = min(self._max_in_flight - self.in_flight, math.inf if room is None else room)
        if space <= 0 and self.in_flight:  # the most frequent case
            return []
        count = self.missing
        if self._max_staleness:
            count = max(count, self._ahead())
        # Returned draws leave gaps in the order; groups behind a gap do not make the batch full.
        gaps = self.draws.gaps() if self._in_order and self.collecting and not self.full else 0
        count = max(count, gaps)
        left = max(gaps, self._budget.left)
        if left <= 0 and self.collecting and not self.full and self.in_flight == 0:
            self._wanted = self._budget.end(usable=self.draws.usable, wanted=self._batch)
            self._advance()
        count = int(min(count, left, space))
        if count <= 0:
            return []
        self._budget.drawn += count
        started = self.draws.start(count, self.version)
        self.prospects.start(started)
        return started

    def _ahead(self) -> int:
        last = min(self.version + self._max_staleness, self._total_steps - 1 if self._total_steps else math.inf)
        limit = int(max(0, last - self._update + 1)) * self._batch
        running = self.prospects.expected(self.rate.value)
        there = Forecast(mean=self.draws.usable + running.mean, variance=running.variance)
        return self.rate.allowed(limit, self._batch, there)

    def verdict(self, index: int, accuracy: float) -> bool:
        """Records the score of one response of a draw in flight, to predict the outcome of its group early. Returns
        whether more draws may start because of it."""
        if self._max_staleness:
            self.prospects.verdict(index, accuracy)
        return self._max_staleness > 0

    def generated(self, index: int, tokens: int) -> None:
        if self._runs(index):
            self.draws.generated(index, tokens)

    def add(self, group: Group) -> None:
        """Takes the scored group of a draw from `take`; ignores a draw that was returned to the stream."""
        if not self._runs(group.draw.index):
            return
        outcome, fate = self._keep(group)
        self._budget.add(group, outcome, fate)
        self.rate.observe(fate == TRAINED)
        self.prospects.end(group.draw.index, fate == TRAINED)
        if self._update - self._version_of(group.draw.index) > self._max_staleness > 0:
            self.draws.send_back([group.draw.index], self._why_back)
        self._advance()
        self._on_scored(group, self.draws.live[group.draw.index].started)

    def _runs(self, index: int) -> bool:
        draw = self.draws.live.get(index)
        return draw is not None and draw.state in (State.IN_GENERATION, State.IN_REWARD)

    def _keep(self, group: Group) -> tuple[str, str]:
        outcome = self._classify(group, self._min_scored)
        fate = TRAINED if outcome in self._usable else outcome
        if fate == TRAINED and not self._has_signal(group):
            fate = Fate.OVERLONG
        self.draws.scored(group, outcome, fate)
        return outcome, fate

    def _advance(self) -> None:
        """Moves the frontier over scored draws, at most to the end of a batch."""
        while self._in_order and self._ready < self._wanted:
            draw = self.draws.live.get(self._frontier)
            if draw is None or draw.state is not State.BUFFERED:
                return
            self._ready += draw.fate == TRAINED
            self._frontier += 1

    @property
    def full(self) -> bool:
        """Whether the batch is known: in draw order, once every draw up to its last group is scored."""
        return (self._ready if self._in_order else self.draws.usable) >= self._wanted

    def close(self) -> Collected:
        """Ends the step and returns the batch with the groups dropped up to its last group. Until `trained`, both count
        as buffered and are saved in checkpoints: a failed update loses no group."""
        assert self.collecting and self.full, "close() before the batch is full"
        self.collecting = False
        self._update += 1
        used = self.draws.train(self._used_up())
        late = {index: self.draws.live[index] for index in self._late()}
        drawn = [(draw.group, draw.fate, draw.outcome) for draw in used if draw.group is not None]
        collected = Collected(
            drawn=tuple(group for group, _, _ in drawn),
            groups=tuple(group for group, fate, _ in drawn if fate == TRAINED),
            fates=tuple(fate for _, fate, _ in drawn),
            outcomes=tuple(outcome for _, _, outcome in drawn),
            returned=tuple(late),
            why_returned=self._why_back,
            unfinished=frozenset(index for index, draw in late.items() if draw.state is State.IN_GENERATION),
            lost=tuple(draw.group for draw in late.values() if draw.group is not None),
            lost_tokens=sum(draw.tokens for draw in late.values()),
        )
        self.draws.send_back(late, self._why_back)
        self.prospects.end_step(late)
        self._stale = len(late) if self._max_staleness else 0
        self._ready = 0
        self._advance()
        self.rate.end_step(usable=len(collected.groups), draws=len(used))
        return collected

    def trained(self) -> None:
        self.draws.trained()

    def in_training(self) -> list[tuple[Group, int]]:
        used = [self.draws.live[index] for index in self.draws.at(State.TRAINING)]
        return [(draw.group, draw.started) for draw in used if draw.group is not None]

    def refused(self) -> None:
        """The closed batch must not be trained on: its draws start again."""
        used = self.draws.at(State.TRAINING)
        self.refusals.update((index, self.draws.live[index].started) for index in used)
        self.draws.send_back(used, REFUSED)
        self._frontier, self._ready = min(self.draws.live, default=self.draws.drawn), 0
        self.serving(self.version)

    def _used_up(self) -> list[int]:
        scored = self.draws.at(State.BUFFERED)
        if self._in_order:
            return sorted(index for index in scored if index < self._frontier)
        usable = [index for index in scored if self.draws.live[index].fate == TRAINED]
        return sorted(set(scored) - set(usable[self._wanted :]))

    def _late(self) -> list[int]:
        """Returns the draws with a version too old for the next update; at staleness 0, all."""
        oldest = self._update - self._max_staleness
        started = self.draws.at(State.IN_GENERATION, State.IN_REWARD, State.BUFFERED)
        return sorted(index for index in started if self._version_of(index) < oldest)

    def _version_of(self, index: int) -> int:
        live = self.draws.live[index]
        return live.oldest if self._age_by_tokens else live.started

    def held(self) -> list[tuple[Group, int]]:
        return self.draws.held()

    def aborted(self, tokens: int) -> None:
        """Adds the tokens of returned draws that were unfinished, once the engines have aborted them."""
        self.draws.tokens[self._why_back] += tokens

    def progress(self) -> tuple[int, int, int]:
        """Returns the numbers of usable groups, of groups wanted, and of scored groups that will be dropped. In draw
        order a batch may lack an early draw while more groups are usable than wanted."""
        usable, scored = self.draws.usable, self.draws.counts[State.BUFFERED]
        return usable, self._wanted, scored - usable

    def metrics(self) -> dict[str, float]:
        return {"buffer/usable_rate": self.rate.value, **self.draws.metrics()}

    def state(self) -> BufferState:
        """Returns what a checkpoint needs besides `held`. Draws in flight are recorded as returned."""
        return self.draws.state(self.rate.state(), 0 if self._max_staleness else self._budget.counted(self.in_flight))

    def restore(
        self,
        state: BufferState,
        held: Collection[tuple[Group, int]],
        since: Collection[tuple[Group, int]] = (),
        *,
        version: int,
        refusals: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        """Restores a checkpoint of policy `version` into an unused buffer; groups that are too old are drawn again.
        since: groups that finished after the checkpoint, of draws it still awaits (`BufferState.awaits`). refusals: as
        saved."""
        self.serving(version)
        self.refusals = Counter(refusals or {})
        self.rate.restore(state.rate)
        self.draws.restore(state, held, since)
        for group, _ in held:
            self._keep(group)
        for group, _ in since:
            _, fate = self._keep(group)
            self.rate.observe(fate == TRAINED)
        if self._max_staleness == 0:  # drawn for the update that is collected next
            self._budget.drawn_before = state.drawn_now + len(since)
        self.draws.send_back(self._late(), self._why_back)
        self._frontier = min(self.draws.live, default=self.draws.drawn)
        self._advance()
