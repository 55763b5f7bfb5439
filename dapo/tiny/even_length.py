"""Reward that a random text earns half of the time: benchmarks get mixed groups without a model that can add."""

from collections.abc import Iterable
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 1.0 if len(solution_str) % 2 == 0 else -1.0


def canaries(name: str, kwargs: dict[str, Any]) -> Iterable[tuple[str, str, dict[str, Any], float]]:
    """Yields known answers, as (solution_str, ground_truth, extra_info, score)."""
    yield "42", "", {}, 1.0
    yield "420", "", {}, -1.0
