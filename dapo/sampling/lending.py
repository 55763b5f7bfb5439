"""Decides when it pays to wake engines on the actors' GPUs (`dapo.sampling.lender`, `trainer.colocate=lend`)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Numbers of responses. own: run at once by engines with their own GPUs. lent: run in addition by engines on the
    actors' GPUs. queued: waiting in an engine for a slot. response_s: mean seconds of one in its slot."""

    own: int
    lent: int
    queued: int
    response_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Lending:
    """own, lent: as in `Slots`. wake_s: seconds until lent engines serve; sleep_s: until the actors have their GPUs."""

    own: int
    lent: int
    wake_s: float
    sleep_s: float

    def gain_s(self, waiting: float, response_s: float) -> float:
        """Returns by how many seconds lending starts the next update earlier; below 0: later. A running response
        does not end earlier. A waiting one gets a slot sooner once the lent engines serve, but the update waits
        until they sleep. waiting: responses that the batch needs and that do not run. response_s: mean seconds of
        one in its slot."""
        alone = waiting * response_s / self.own
        return alone - min(alone, self.wake_s) - self.awake_s(waiting, response_s) - self.sleep_s

    def awake_s(self, waiting: float, response_s: float) -> float:
        alone = waiting * response_s / self.own
        return max(0.0, alone - self.wake_s) * self.own / (self.own + self.lent)
