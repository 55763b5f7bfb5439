"""Decides when engines on the actors' GPUs are worth waking: work that waits in, seconds of the step out.

The same rule decides in a run (`dapo.sampling.lender`, `trainer.colocate=lend`) and in `dapo.simulate`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Counts responses. own: that the engines with GPUs of their own run at once. lent: that those on the actors' GPUs
    would run besides. queued: that wait in an engine for a slot. response_s: mean seconds of one in its slot."""

    own: int
    lent: int
    queued: int
    response_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Lending:
    """Describes what could be lent. own: responses that the engines run at once. lent: those that engines on the
    actors' GPUs would run besides. wake_s, sleep_s: measured seconds until those engines serve, and until the actors
    have their GPUs back."""

    own: int
    lent: int
    wake_s: float
    sleep_s: float

    def gain_s(self, waiting: float, response_s: float) -> float:
        """Returns by how many seconds lending starts the next update earlier; below 0: later.

        A response that runs already ends when it ends, whoever else wakes. One that waits for a slot does so for less
        long with more of them, from the time that they serve; and the update waits for the lent ones to sleep.
        waiting: responses that the batch needs and that do not run. response_s: mean seconds of one in its slot.
        """
        alone = waiting * response_s / self.own
        return alone - min(alone, self.wake_s) - self.awake_s(waiting, response_s) - self.sleep_s

    def awake_s(self, waiting: float, response_s: float) -> float:
        """Returns for how many seconds the lent engines would serve."""
        alone = waiting * response_s / self.own
        return max(0.0, alone - self.wake_s) * self.own / (self.own + self.lent)
