"""Computes how many draws a step still needs, from the outcomes of finished draws. It estimates the fraction of usable
draws, and uses quantiles of a sum of Bernoulli draws. Pure arithmetic, also used for simulated engines."""

import math


class UsableRate:
    """Running estimate of the fraction of draws that give a usable group.

    It covers about the last two steps, to follow a rate that drifts with the policy. A step with many draws weighs no
    more than the next one, or a rising rate would be followed late. Within a step it learns from every draw that
    finishes, which depends on timing; at the end of the step, the draws that the step used up replace these, which do
    not.
    """

    KEEP = 0.5  # weight of earlier steps, at each new step
    LATE_Z = 1.0  # a late refill costs most of a response's time, an extra draw a thousandth of a step
    AHEAD_Z = 1.0  # an extra draw ahead of time is stale when its turn comes

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

    def ahead(self, wanted: int) -> int:
        """Returns how many draws give at most `wanted` usable groups, with a probability of about 84 %."""
        p, wanted = self.value, max(0, wanted)
        return int((wanted - self.AHEAD_Z * math.sqrt(wanted * (1.0 - p))) / p)

    def state(self) -> list[float]:
        return list(self._past)

    def restore(self, state: list[float]) -> None:
        usable, draws = state
        self._usable, self._draws = self._past = (usable, draws)
