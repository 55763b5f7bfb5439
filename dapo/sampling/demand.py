"""Computes how many draws a step still needs, from the outcomes of finished draws. It estimates the fraction of usable
draws, and uses quantiles of a sum of Bernoulli draws. Pure arithmetic, also used for simulated engines."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Mean and variance of a number of usable groups."""

    mean: float
    variance: float


class UsableRate:
    """Running estimate of the fraction of draws that give a usable group.

    It covers about the last two steps, to follow a rate that drifts with the policy. A step with many draws weighs no
    more than the next one, or a rising rate would be followed late. Within a step it learns from every draw that
    finishes, which depends on timing; at the end of the step, the draws that the step used up replace these, which do
    not.
    """

    KEEP = 0.5  # weight of earlier steps, at each new step
    LATE_Z = 1.0  # a late refill costs most of a response's time, an extra draw a thousandth of a step
    AHEAD_Z = 2.0  # an extra draw ahead of time is stale when its turn comes
    # A draw too few starts at the next policy version, and its longest response ends that much later: so this fraction
    # of a batch may become stale.
    SURPLUS = 0.01

    def __init__(self, *, certain: bool) -> None:
        """certain: every draw is usable (no filter)."""
        self._certain = certain
        self._usable, self._draws = self._past = (1.0, 1.0) if certain else (0.5, 1.0)

    @property
    def value(self) -> float:
        return 1.0 if self._certain else self._usable / self._draws

    def observe(self, usable: bool) -> None:
        self._usable += usable
        self._draws += 1.0

    def end_step(self, *, usable: int, draws: int) -> None:
        """Replaces what was observed within the step by what it used up; older outcomes fade."""
        before_usable, before_draws = self._past
        weight = min(1.0, max(1, draws) / before_draws)
        self._past = (
            self.KEEP * (weight * before_usable + usable),
            self.KEEP * (weight * before_draws + draws),
        )
        self._usable, self._draws = self._past

    def missing(self, wanted: int, *, usable: int, in_flight: int) -> int:
        """Returns how many draws to start now so that `wanted` usable groups result with a probability of about 84 %.
        usable: groups that are there. in_flight: draws whose outcome is not known.

        With u usable ones among T draws of rate p, those in flight included, u is at least E[u] - z sd(u); sd includes
        the uncertainty of p itself, which matters in the very first step.
        """
        if usable >= wanted:
            return 0
        need = wanted - usable
        if self._certain:
            return max(0, need - in_flight)
        p = self.value
        variance = self.LATE_Z**2 * p * (1.0 - p)
        doubt = variance / self._draws  # of the rate: grows with the square of the draws
        slope = max(p * p - doubt, 0.05 * p * p)
        # (T p - need)^2 >= variance T + doubt T^2
        half = need * p + variance / 2
        total = (half + math.sqrt(max(half * half - slope * need * need, 0.0))) / slope
        return max(0, math.ceil(total - in_flight - 1e-9))

    def allowed(self, limit: int, batch: int, there: Forecast) -> int:
        """Returns how many draws may start now for updates that train on `limit` groups in total (whole batches), so
        that usable groups rarely (2 %) exceed `limit` by more than SURPLUS of a batch. there: forecast without these
        draws."""
        p = self.value
        if limit <= 0 or p >= 1.0:
            return max(0, int(limit - there.mean))
        room = limit + self.SURPLUS * batch - there.mean
        # E[u] + z sd(u) <= limit, with y = sd / z: y^2 / (1 - p) + z y <= room + variance of what is there / (1 - p)
        spread = 1.0 / (1.0 - p)
        least = max(0.0, room + there.variance * spread)
        y = (-self.AHEAD_Z + math.sqrt(self.AHEAD_Z**2 + 4 * spread * least)) / (2 * spread)
        return max(0, int((y * y - there.variance) / (p * (1.0 - p))))

    def state(self) -> list[float]:
        return list(self._past)

    def restore(self, state: list[float]) -> None:
        usable, draws = state
        self._usable, self._draws = self._past = (usable, draws)
