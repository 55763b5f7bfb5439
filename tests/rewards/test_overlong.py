"""Soft Overlong Punishment against Eq. 13's values for the paper's lengths."""

import pytest

from dapo.rewards.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        pytest.param(1, 0.0, id="short"),
        pytest.param(16384, 0.0, id="last-free-token"),
        pytest.param(16385, -1 / 4096, id="first-punished-token"),
        pytest.param(18432, -0.5, id="half-the-buffer"),
        pytest.param(20480, -1.0, id="cap"),
        pytest.param(24576, -1.0, id="beyond-the-cap"),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_golden_values(num_tokens: int, expected: float, factor: float) -> None:
    penalty = overlong_penalty(num_tokens, max_response_length=20480, buffer_length=4096, penalty_factor=factor)
    assert penalty == pytest.approx(expected * factor, abs=1e-9)


def test_factor_defaults_to_one_and_zero_has_no_sign() -> None:
    assert overlong_penalty(24576, max_response_length=20480, buffer_length=4096) == -1.0
    assert str(overlong_penalty(16384, max_response_length=20480, buffer_length=4096)) == "0.0"


@pytest.mark.parametrize("buffer_length", [0, -1])
def test_a_buffer_without_tokens_is_refused(buffer_length: int) -> None:
    with pytest.raises(ValueError, match=rf"`reward.overlong_buffer.len` \({buffer_length}\)"):
        overlong_penalty(5, max_response_length=10, buffer_length=buffer_length)
