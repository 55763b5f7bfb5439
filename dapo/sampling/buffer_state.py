"""The buffer's part of a checkpoint; the groups that it holds are in `dapo.sampling.saved`."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferState:
    """What a continued run needs of the buffer, besides the groups that it holds. Made and consumed by the buffer.

    reached: the first draw that was never started. next: no draw from here on is used up or finished. retry: draws
    before `next` that are to be started again. rate: `UsableRate.state()`. ledger: `Ledger.state()`.
    """

    reached: int
    next: int
    retry: list[int]
    rate: list[float]
    ledger: dict[str, dict[str, int]]

    @classmethod
    def parse(cls, values: Any) -> "BufferState":
        """From JSON. Raises TypeError or ValueError where it is anything else."""
        state = cls(**values)
        whole = [
            state.reached,
            state.next,
            *state.retry,
            *state.ledger["draws"].values(),
            *state.ledger["tokens"].values(),
        ]
        if not all(type(number) is int and number >= 0 for number in whole):
            raise ValueError(f"counts that are no whole numbers: {whole}")
        usable, draws = state.rate
        if not 0 < usable <= draws:
            raise ValueError(f"no rate: {state.rate}")
        return state
