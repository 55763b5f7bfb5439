"""Estimates what k samples per problem achieve, from n >= k samples of each, with intervals over problems. avg@n,
pass@k, best@k and maj@k are defined in dapo/README.md: means over the subsets of k samples, drawn without replacement,
hence unbiased. Pure functions; the bootstrap has a fixed seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RIGHT = 0.5  # an accuracy above it is correct, as in the group filter
LEVEL = 0.95  # of the intervals
RESAMPLES = 2000
RESAMPLED_AT_ONCE = 1 << 22  # array elements in memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over problems (NaN if no problem has a value) and its 95 % interval."""

    value: float
    low: float
    high: float


def sizes(samples: int) -> list[int]:
    """Returns the k to estimate: powers of 2 up to the samples per problem, and that number itself; not 1."""
    return sorted({*(1 << power for power in range(1, samples.bit_length())), samples} - {1})


def pass_at(accuracies: Sequence[float], k: int) -> float:
    """Returns the probability that one of k samples is correct (arXiv 2107.03374); NaN with fewer than k."""
    n, right = len(accuracies), sum(accuracy > RIGHT for accuracy in accuracies)
    return 1.0 - math.comb(n - right, k) / math.comb(n, k) if k <= n else math.nan


def best_at(accuracies: Sequence[float], k: int) -> float:
    """Returns the mean of the best accuracy of k samples; NaN with fewer than k."""
    if k > len(accuracies):
        return math.nan
    subsets = math.comb(len(accuracies), k)  # of these, C(rank, k - 1) have the sample of this rank as their best
    ranked = enumerate(sorted(accuracies))
    return sum(accuracy * (math.comb(rank, k - 1) / subsets) for rank, accuracy in ranked)


def majority_at(accuracies: Sequence[float], answers: Sequence[str], k: int) -> float:
    """Returns the mean accuracy of the majority answer of k samples; NaN with fewer than k. Samples without an answer
    ("") do not vote; if none has an answer, the vote is wrong. The accuracy of an answer is the mean over the samples
    that give it."""
    if k > len(accuracies):
        return math.nan
    given: dict[str, list[float]] = {}
    for accuracy, answer in zip(accuracies, answers, strict=True):
        given.setdefault(answer, []).append(accuracy)
    silent = len(given.pop("", []))
    candidates = sorted((len(each), sum(each) / len(each)) for each in given.values())
    if k < len(accuracies):
        return _majority(tuple(candidates), silent, k)
    tied = [accuracy for count, accuracy in candidates if count == candidates[-1][0]]
    return sum(tied) / len(tied) if tied else 0.0


@lru_cache(maxsize=4096)  # many problems are alike: all correct, or one answer correct and the others all different
def _majority(candidates: tuple[tuple[int, float], ...], silent: int, k: int) -> float:
    """The same from answers as (number of samples, accuracy), and the number of samples without an answer.

    An answer wins with m votes in the subsets where no other has more, and counts 1 / t if t answers tie. Products of
    polynomials count these subsets: x^j for j samples, y for each tie. 1 / t is the integral of y^(t - 1) over [0, 1],
    which Gauss-Legendre quadrature computes exactly.
    """
    votes, y, weight = _grid(k, max((count for count, _ in candidates), default=0))
    total = 0.0
    for winner, (count, accuracy) in enumerate(candidates):
        if not accuracy:
            continue
        subsets = np.zeros((len(votes), k + 1))  # [m and y, samples of the others]
        subsets[:, 0] = 1.0
        for other, (number, _) in enumerate(candidates):
            if other != winner:
                ways = [math.comb(number, j) * np.where(j < votes, 1.0, (j == votes) * y) for j in range(number + 1)]
                subsets = _times(subsets, ways)
        subsets = _times(subsets, [math.comb(silent, j) * np.ones_like(y) for j in range(silent + 1)])
        own = np.array([float(math.comb(count, m)) for m in votes])
        total += accuracy * float((weight * own * subsets[np.arange(len(votes)), k - votes]).sum())
    return total / math.comb(sum(count for count, _ in candidates) + silent, k)


@lru_cache
def _grid(k: int, most: int) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Returns the vote counts (at most `most`) that can win among k, each with every quadrature node y and weight."""
    points = [
        (m, (point + 1) / 2, weight / 2)  # mapped from [-1, 1] to [0, 1]
        for m in range(1, min(k, most) + 1)
        for point, weight in zip(*np.polynomial.legendre.leggauss((k // m + 1) // 2), strict=True)  # up to k // m ties
    ]
    votes, ys, weights = np.array(points, dtype=np.float64).reshape(-1, 3).T
    return votes.astype(np.int64), ys, weights


def _times(polynomials: Floats, factors: Sequence[Floats]) -> Floats:
    """Multiplies polynomials in x [rows, degree] by one more factor each, truncated at their degree."""
    product = np.zeros_like(polynomials)
    for j, coefficients in enumerate(factors[: polynomials.shape[1]]):
        product[:, j:] += coefficients[:, None] * polynomials[:, : polynomials.shape[1] - j]
    return product


def over_problems(values: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    """Returns the mean over problems of each quantity, with a percentile bootstrap over problems. values: one number
    per problem, in the same order; NaN leaves a problem out. All quantities use the same resamples, and the result is
    deterministic."""
    table = np.array(list(values.values()), dtype=np.float64)  # [quantities, problems]
    known = ~np.isnan(table)
    means = _ratio(np.nansum(table, axis=1), known.sum(axis=1))
    problems = table.shape[1]
    rng, resampled = np.random.default_rng(0), []
    for first in range(0, RESAMPLES, part := max(1, RESAMPLED_AT_ONCE // max(problems, 1))):
        counts = rng.multinomial(problems, np.full(problems, 1 / problems), size=min(part, RESAMPLES - first))
        resampled.append(_ratio(counts @ np.nan_to_num(table).T, counts @ known.T))
    edges = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    found: dict[str, Estimate] = {}
    for name, mean, means_of in zip(values, means, np.concatenate(resampled).T, strict=True):
        means_of = means_of[~np.isnan(means_of)]
        low, high = np.quantile(means_of, edges) if len(means_of) else (math.nan, math.nan)
        found[name] = Estimate(value=float(mean), low=float(low), high=float(high))
    return found


def _ratio(numerator: Floats, denominator: NDArray[np.int64]) -> Floats:
    return np.divide(numerator, denominator, out=np.full(np.shape(numerator), np.nan), where=denominator > 0)
