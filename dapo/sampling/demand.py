"""Computes how many draws a step still needs: verdicts of finished draws in, a number of draws to start out.

A running estimate of the share of draws that give a usable group, and quantiles of the sum of Bernoulli draws made of
it. Pure arithmetic: the same code plans for real engines and for simulated ones.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Holds mean and variance of a number of usable groups."""

    mean: float
    variance: float


class UsableRate:
    """Estimates the share of draws that give a usable group, as it goes.

    It holds about the last two steps, so that it follows a rate that drifts with the policy; one that took many draws
    weighs no more than the one after it, or a rate that rises would be followed late. It learns within a step from
    every draw that finishes. What finishes within a step depends on timing; what a step used up does not, and replaces
    it when the step ends.
    """

    KEEP = 0.5  # weight of the steps before, at each new step
    LATE_Z = 1.0  # a refill that comes late costs most of a response's time, a draw too many a thousandth of a step
    AHEAD_Z = 2.0  # a draw too many ahead of time is stale when its turn comes
    # One too few starts at the next policy version instead, and the longest of its responses ends that much later: so
    # few groups of a batch may well become stale.
    SURPLUS = 0.01

    def __init__(self, *, certain: bool) -> None:
        """Starts from a guess; certain: every draw is usable (no filter)."""
        self._certain = certain
        self._usable, self._draws = self._past = (1.0, 1.0) if certain else (0.5, 1.0)

    @property
    def value(self) -> float:
        """Returns the estimate, in (0, 1]."""
        return 1.0 if self._certain else self._usable / self._draws

    def observe(self, usable: bool) -> None:
        """Adds the outcome of a draw within a step."""
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
        """Counts the draws to start now so that `wanted` usable groups come out of the window with a probability of
        about 84 %. usable: groups that are there. in_flight: draws whose outcome is not known.

        With u usable ones among T draws of rate p, those in flight included, u is at least E[u] - z sd(u), and sd holds
        the uncertainty of p itself, which matters in the very first step.
        """
        if usable >= wanted:
            return 0
        need = wanted - usable
        if self._certain:
            return max(0, need - in_flight)
        p = self.value
        variance = self.LATE_Z**2 * p * (1.0 - p)  # of one draw
        doubt = variance / self._draws  # of the rate: grows with the square of the draws
        slope = max(p * p - doubt, 0.05 * p * p)
        # (T p - need)^2 >= variance T + doubt T^2
        half = need * p + variance / 2
        total = (half + math.sqrt(max(half * half - slope * need * need, 0.0))) / slope
        return max(0, math.ceil(total - in_flight - 1e-9))

    def allowed(self, limit: int, batch: int, there: Forecast) -> int:
        """Counts the draws that may start now for updates that train on `limit` groups, whole batches, in all: so many
        that hardly ever (2 %) more than SURPLUS of a batch come out usable beyond them. there: what comes without
        them."""
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
        """Returns what a checkpoint needs."""
        return list(self._past)

    def restore(self, state: list[float]) -> None:
        """Restores what `state` returned."""
        usable, draws = state
        self._usable, self._draws = self._past = (usable, draws)
