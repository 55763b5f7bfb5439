"""Penalizes long responses by their number of tokens: Soft Overlong Punishment (DAPO Eq. 13). The penalty is added to
the reward and never changes the accuracy by which groups are filtered. Use `compute_score` in `reward.functions` for a
weight or another buffer."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

READS_LAST = 0  # characters of a solution that the score depends on


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    *,
    max_response_length: int,
    buffer_length: int,
    penalty_factor: float = 1.0,
) -> float:
    """Returns the penalty for extra_info["num_response_tokens"], which the reward worker sets, as a number without
    `acc`. Raises ValueError for a setting out of range or a missing number of tokens."""
    if not 1 <= buffer_length <= max_response_length:
        raise ValueError(
            f"`buffer_length` ({buffer_length}) must be 1 to `max_response_length` ({max_response_length}); lower it"
        )
    if not math.isfinite(penalty_factor) or penalty_factor < 0:
        raise ValueError(f"`penalty_factor` ({penalty_factor}) must be a number from 0 up; it is subtracted as it is")
    tokens = extra_info.get("num_response_tokens") if isinstance(extra_info, Mapping) else None
    if not isinstance(tokens, int):
        raise ValueError(
            f"`extra_info.num_response_tokens` ({tokens}) must be the response's length in tokens; call this function "
            "from a reward worker, or set it"
        )
    return overlong_penalty(
        tokens, max_response_length=max_response_length, buffer_length=buffer_length, penalty_factor=penalty_factor
    )


def canaries(name: str, kwargs: dict[str, Any]) -> Iterable[tuple[str, str, dict[str, Any], float]]:
    """Raises ValueError naming missing kwargs."""
    missing = [key for key in ("max_response_length", "buffer_length") if key not in kwargs]
    if missing:
        raise ValueError(
            f"`kwargs` of the reward function overlong must hold {' and '.join(missing)}, in tokens; add them"
        )
    longest, factor = int(kwargs["max_response_length"]), float(kwargs.get("penalty_factor", 1.0))
    yield "", "", {"num_response_tokens": longest - int(kwargs["buffer_length"])}, 0.0
    yield "", "", {"num_response_tokens": longest}, -factor
    yield "", "", {"num_response_tokens": 2 * longest}, -factor


def overlong_penalty(
    num_tokens: int, *, max_response_length: int, buffer_length: int, penalty_factor: float = 1.0
) -> float:
    """Returns 0 up to max_response_length - buffer_length tokens, then linearly down to -penalty_factor at the cap. All
    lengths in tokens. With a cap of 20480 and a buffer of 4096: 16384 -> 0, 18432 -> -0.5, 20480 -> -1. Raises
    ValueError for a buffer below 1."""
    if buffer_length < 1:
        raise ValueError(
            f"`reward.overlong_buffer.len` ({buffer_length}) must be at least 1; to have no penalty set "
            "`reward.overlong_buffer.enable: false`"
        )
    excess = num_tokens - (max_response_length - buffer_length)
    if excess <= 0:
        return 0.0
    return -min(excess / buffer_length, 1.0) * penalty_factor
