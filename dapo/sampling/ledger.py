"""The ledger of draws and tokens: where every draw is, and what became of every generated token (DESIGN section 4).

In: transitions, told by the buffer. Out: counts, goodput, waste by reason. The identities

    drawn     = trained + dropped + buffered + in_reward + in_generation + to_retry   (draws)
    generated = trained + dropped + buffered + in_reward + aborted                    (tokens)

hold after every transition; `check` recounts them. Dropped are groups without a signal. A group that is not needed or
too old is not dropped: its draw goes back to the stream, so that no prompt is skipped, and only its tokens are lost.
"""

from collections import Counter
from collections.abc import Collection, Mapping

IN_GENERATION = "in_generation"
IN_REWARD = "in_reward"
BUFFERED = "buffered"
TO_RETRY = "to_retry"
TRAINED = "trained"
DROPPED = ("all_correct", "all_wrong", "unscorable")
SURPLUS = "surplus"  # generated beyond the batch, at staleness 0
STALE = "stale"  # too old for the next update
STOPPED = "stopped"  # between generation and verdict when the run stopped
ABORTED = (SURPLUS, STALE, STOPPED)  # why tokens of a draw that went back to the stream are lost
LIVE = (IN_GENERATION, IN_REWARD, BUFFERED, TO_RETRY)
NEXT = {  # the transitions that exist
    IN_GENERATION: {IN_REWARD, TO_RETRY},
    IN_REWARD: {BUFFERED, TO_RETRY},
    BUFFERED: {TRAINED, TO_RETRY, *DROPPED},
    TO_RETRY: {IN_GENERATION},
}


class Ledger:
    """Counts draws by state and tokens by fate. Draws that ended are only counted: a run has millions of them."""

    def __init__(self) -> None:
        self.drawn = 0
        self.draws: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()  # by state or fate, with "generated" and the reasons of `ABORTED`
        self._live: dict[int, tuple[str, int]] = {}  # state and tokens of each draw that did not end

    def start(self, index: int) -> None:
        """A draw goes to the engines, for the first time or again."""
        if index in self._live:
            self._move(index, IN_GENERATION)
        else:
            self.drawn += 1
            self._enter(index, IN_GENERATION, 0)

    def generated(self, index: int, tokens: int) -> None:
        """All responses of a draw are there; their scores are not."""
        self.tokens["generated"] += tokens
        self._move(index, IN_REWARD, tokens)

    def buffer(self, index: int) -> None:
        """The group has its scores."""
        self._move(index, BUFFERED)

    def train(self, index: int) -> None:
        """The group was part of an update."""
        self._move(index, TRAINED)

    def drop(self, index: int, reason: str) -> None:
        """The group will not be trained on; reason: one of `DROPPED`."""
        self._move(index, reason)

    def retry(self, index: int, reason: str) -> None:
        """The draw goes back to the stream; the tokens of its group, if it had all of them, are lost for `reason`."""
        _, tokens = self._live[index]
        self.tokens[reason] += tokens
        self._move(index, TO_RETRY, -tokens)

    def aborted(self, tokens: int, reason: str) -> None:
        """Tokens of unfinished draws that went back, known once the engines have ended them."""
        self.tokens["generated"] += tokens
        self.tokens[reason] += tokens

    @property
    def aborted_tokens(self) -> int:
        """Of draws that went back to the stream."""
        return sum(self.tokens[reason] for reason in ABORTED)

    def metrics(self) -> dict[str, float]:
        """Counts over the whole run, by state or fate, and shares of all generated tokens: trained (goodput), dropped
        for lack of a signal, and wasted by reason."""
        generated = max(1, self.tokens["generated"])
        return {
            "ledger/drawn": self.drawn,
            **{f"ledger/draws_{name}": self.draws[name] for name in (*LIVE, TRAINED, *DROPPED)},
            "ledger/tokens_generated": self.tokens["generated"],
            "ledger/goodput": self.goodput,
            **{f"ledger/dropped_{name}": self.tokens[name] / generated for name in DROPPED},
            **{f"ledger/wasted_{name}": self.tokens[name] / generated for name in ABORTED},
        }

    @property
    def goodput(self) -> float:
        """Trained tokens over generated ones; 1 before the first."""
        return self.tokens[TRAINED] / self.tokens["generated"] if self.tokens["generated"] else 1.0

    def state(self) -> dict[str, dict[str, int]]:
        """For the checkpoint."""
        return {"draws": dict(self.draws), "tokens": dict(self.tokens)}

    def restore(
        self, state: Mapping[str, Mapping[str, int]], *, to_retry: Collection[int], buffered: Mapping[int, int]
    ) -> None:
        """From a checkpoint. to_retry: draws that go out again. buffered: tokens of each group that is held."""
        self.draws, self.tokens = Counter(state["draws"]), Counter(state["tokens"])
        self.drawn = self.draws.total()
        self._live = {index: (TO_RETRY, 0) for index in to_retry}
        self._live |= {index: (BUFFERED, tokens) for index, tokens in buffered.items()}

    def check(self, held: Mapping[str, int]) -> None:
        """Recounts both identities, and compares with what the buffer holds by state.

        Raises AssertionError: a defect of ours; the message has all counts.
        """
        states = Counter(state for state, _ in self._live.values())
        tokens: Counter[str] = Counter()
        for state, count in self._live.values():
            tokens[state] += count
        counts = f"drawn {self.drawn}, draws {dict(self.draws)}, tokens {dict(self.tokens)}, held {dict(held)}"
        assert self.drawn == sum(self.draws.values()), counts
        assert all(states[state] == self.draws[state] for state in LIVE), counts
        assert all(states[state] == held.get(state, 0) for state in LIVE), counts
        assert all(tokens[state] == self.tokens[state] for state in LIVE), counts
        fates = self.tokens.total() - self.tokens["generated"]
        assert self.tokens["generated"] == fates, counts

    def _enter(self, index: int, state: str, tokens: int) -> None:
        self.draws[state] += 1
        if tokens:
            self.tokens[state] += tokens
        if state in LIVE:
            self._live[index] = (state, tokens)

    def _move(self, index: int, state: str, more_tokens: int = 0) -> None:
        before, tokens = self._live.pop(index)
        assert state in NEXT[before], f"draw {index}: {before} -> {state}"
        self.draws[before] -= 1
        if tokens:
            self.tokens[before] -= tokens
        self._enter(index, state, tokens + more_tokens)
