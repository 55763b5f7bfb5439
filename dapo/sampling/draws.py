"""The table of draws: the state of each draw that has not ended, and totals of those that have.

    start ─▶ in generation ─▶ in reward ─▶ buffered ─▶ training ─▶ trained, or dropped for lack of a signal
      ▲             │             │           │
      └─ to retry ◀─┴─────────────┴───────────┘   its tokens are lost

A group that is not needed or too old is not dropped (DAPO Eq. 11): its draw starts again, so that no prompt is skipped.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum, auto

from dapo.algorithm.fate import DROPPED, TRAINED
from dapo.types import Group


class State(StrEnum):
    IN_GENERATION = auto()
    IN_REWARD = auto()  # all responses ended, scores pending
    BUFFERED = auto()  # scored; the group waits for its turn
    TRAINING = auto()  # used up by the update under way, trained on or dropped
    TO_RETRY = auto()  # returned to the stream


SURPLUS = "surplus"  # generated beyond the batch, at staleness 0
STALE = "stale"  # too old for the next update
REFUSED = "refused"  # by the actors, and set aside
STOPPED = "stopped"  # generated but not scored when the run stopped
LOST = (SURPLUS, STALE, REFUSED, STOPPED)  # why tokens of a returned draw are lost


@dataclass(slots=True)
class LiveDraw:
    """A draw that has not ended. started: policy version at its last start. tokens: of all its responses, once
    generated. group, outcome, fate: once scored; fate is how it will end if an update uses it up."""

    started: int
    state: State
    tokens: int = 0
    group: Group | None = None
    outcome: str = ""
    fate: str = ""

    @property
    def oldest(self) -> int:
        """Version of the oldest token: an engine outside of the cluster may lag behind the version at the start."""
        responses = () if self.group is None else self.group.responses
        return min([self.started, *(span.version for one in responses for span in one.policy_versions)])


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferState:
    """What a resumed run needs of the buffer besides its groups; draws in flight are recorded as returned. retry: draws
    that start again. draws: ended ones, by fate. tokens: of ended draws by fate, and lost ones by reason. rate:
    `UsableRate.state()`. drawn_now: number of groups that count towards the budget of the update being collected; 0
    above staleness 0, once the budget is spent, and in checkpoints of older versions."""

    retry: list[int]
    draws: dict[str, int]
    tokens: dict[str, int]
    rate: list[float]
    drawn_now: int = 0

    def drawn(self, held: int) -> int:
        """Number of draws ever started. held: number of groups in the same checkpoint."""
        return sum(self.draws.values()) + len(self.retry) + held

    def awaits(self, index: int, held: int) -> bool:
        """Whether the group of draw `index` is still to come. held: as in `drawn`."""
        return index in self.retry or index >= self.drawn(held)


class Draws:
    """All draws that have not ended, by index. The others are only counted: a run has millions of them. live: scored
    draws are in the order of their scoring. counts: draws by state or fate. tokens: of ended draws by fate, and of
    returned draws by reason. usable: buffered draws that an update can train on."""

    def __init__(self) -> None:
        self.live: dict[int, LiveDraw] = {}
        self.counts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.usable = 0

    @property
    def drawn(self) -> int:
        """Number of draws ever started, which is also the index of the next new one."""
        return self.counts.total()

    @property
    def generated_tokens(self) -> int:
        return self.tokens.total() + sum(draw.tokens for draw in self.live.values())

    def at(self, *states: State) -> list[int]:
        return [index for index, draw in self.live.items() if draw.state in states]

    @property
    def settled(self) -> int:
        """The first index from which on all started draws were returned to the stream and wait there."""
        index = self.drawn
        while (draw := self.live.get(index - 1)) is not None and draw.state is State.TO_RETRY:
            index -= 1
        return index

    def gaps(self) -> int:
        """Number of returned draws that precede another one in the draw order."""
        waiting = self.at(State.TO_RETRY) if self.counts[State.TO_RETRY] else []
        last = max(self.live.keys() - waiting, default=-1) if waiting else -1
        return sum(index < last for index in waiting)

    def held(self) -> list[tuple[Group, int]]:
        """Returns groups that no finished update has used up, each with the policy version at its start, in draw
        order."""
        return [(draw.group, draw.started) for _, draw in sorted(self.live.items()) if draw.group is not None]

    def start(self, count: int, version: int) -> list[int]:
        """Starts the next draws at policy `version`: the lowest returned ones, then new ones."""
        waiting = sorted(self.at(State.TO_RETRY))[:count] if self.counts[State.TO_RETRY] else []
        new = range(self.drawn, self.drawn + count - len(waiting))
        self.live |= {index: LiveDraw(version, State.IN_GENERATION) for index in (*waiting, *new)}
        self.counts.update({State.TO_RETRY: -len(waiting), State.IN_GENERATION: count})
        return [*waiting, *new]

    def generated(self, index: int, tokens: int) -> None:
        self._move(index, State.IN_REWARD, State.IN_GENERATION)
        self.live[index].tokens = tokens

    def scored(self, group: Group, outcome: str, fate: str) -> None:
        """Stores the group of a draw, which becomes the last in scoring order. fate: TRAINED or one of DROPPED."""
        draw = self.live[group.draw.index] = self.live.pop(group.draw.index)
        draw.group, draw.outcome, draw.fate = group, outcome, fate
        self._move(group.draw.index, State.BUFFERED, State.IN_REWARD)

    def train(self, indices: Iterable[int]) -> list[LiveDraw]:
        return [self._move(index, State.TRAINING, State.BUFFERED) for index in indices]

    def trained(self) -> None:
        for index in self.at(State.TRAINING):
            draw = self.live.pop(index)
            self.counts[State.TRAINING] -= 1
            self.counts[draw.fate] += 1
            self.tokens[draw.fate] += draw.tokens

    def send_back(self, indices: Iterable[int], reason: str) -> None:
        """Returns draws to the stream; the tokens of their groups are lost. Draws in training can only be REFUSED."""
        before = (State.TRAINING,) if reason == REFUSED else (State.IN_GENERATION, State.IN_REWARD, State.BUFFERED)
        for index in indices:
            draw = self._move(index, State.TO_RETRY, *before)
            self.tokens[reason] += draw.tokens
            draw.tokens, draw.group = 0, None

    def state(self, rate: list[float], drawn_now: int = 0) -> BufferState:
        """Returns what a checkpoint needs besides `held`. drawn_now: upper bound of `BufferState.drawn_now`."""
        unscored = sum(self.live[index].tokens for index in self.at(State.IN_REWARD))
        return BufferState(
            retry=sorted(index for index, draw in self.live.items() if draw.group is None),
            draws={name: count for name, count in self.counts.items() if name not in set(State)},
            tokens=dict(self.tokens + Counter({STOPPED: unscored})),
            rate=rate,
            drawn_now=min(drawn_now, self.counts[State.BUFFERED] + self.counts[State.TRAINING]),
        )

    def restore(
        self, state: BufferState, held: Collection[tuple[Group, int]], since: Collection[tuple[Group, int]] = ()
    ) -> None:
        """Fills an unused table from a checkpoint. Groups in `held`, and in `since` (finished after the checkpoint),
        are restored as not scored yet. Draws that the checkpoint does not know and that have no group start again."""
        drawn = state.drawn(len(held))
        unknown = range(drawn, max([drawn, *[group.draw.index + 1 for group, _ in since]]))
        self.live = {index: LiveDraw(0, State.TO_RETRY) for index in (*state.retry, *unknown)}
        for group, started in (*held, *since):
            self.live[group.draw.index] = LiveDraw(started, State.IN_REWARD, group.num_tokens)
        self.counts = Counter(state.draws) + Counter(draw.state for draw in self.live.values())
        self.tokens = Counter(state.tokens)

    def metrics(self) -> dict[str, float]:
        """Counts by state or fate, and fractions of all tokens: trained (goodput), dropped, wasted by reason."""
        counts = self.counts + Counter({State.BUFFERED: self.counts[State.TRAINING]})
        states = (State.IN_GENERATION, State.IN_REWARD, State.BUFFERED, State.TO_RETRY)
        generated = self.generated_tokens
        share = {name: count / generated for name, count in self.tokens.items() if count}
        return {
            "ledger/drawn": self.drawn,
            **{f"ledger/draws_{name}": counts[name] for name in (*states, TRAINED, *DROPPED)},
            "ledger/tokens_generated": generated,
            "ledger/goodput": share.get(TRAINED, 0.0) if generated else 1.0,
            **{f"ledger/dropped_{name}": share.get(name, 0.0) for name in DROPPED},
            **{f"ledger/wasted_{name}": share.get(name, 0.0) for name in LOST},
        }

    def _move(self, index: int, to: State, *allowed: State) -> LiveDraw:
        draw = self.live[index]
        assert draw.state in allowed, f"draw {index}: {draw.state} -> {to}"
        self.usable += (draw.fate == TRAINED) * ((to is State.BUFFERED) - (draw.state is State.BUFFERED))
        self.counts[draw.state] -= 1
        self.counts[to] += 1
        draw.state = to
        return draw
