"""Number of response tokens in, penalty out: Soft Overlong Punishment (DAPO Eq. 13).

The penalty is added to the reward after the verdict; it never touches the accuracy by which groups are filtered.
"""


def overlong_penalty(
    num_tokens: int, *, max_response_length: int, buffer_length: int, penalty_factor: float = 1.0
) -> float:
    """0 up to max_response_length - buffer_length tokens, then linearly down to -penalty_factor at the cap, and beyond.

    All lengths in tokens. With a cap of 20480 and a buffer of 4096: 16384 -> 0, 18432 -> -0.5, 20480 -> -1.
    Raises ValueError for a buffer without tokens.
    """
    if buffer_length < 1:
        raise ValueError(
            f"`reward.overlong_buffer.len` ({buffer_length}) must be at least 1; to have no penalty set "
            "`reward.overlong_buffer.enable: false`"
        )
    excess = num_tokens - (max_response_length - buffer_length)
    if excess <= 0:
        return 0.0
    return -min(excess / buffer_length, 1.0) * penalty_factor
