"""Soft Overlong Punishment against Eq. 13's values for the paper's lengths."""

import math
from typing import Any

import pytest

from dapo.rewards.overlong import READS_LAST, canaries, compute_score, overlong_penalty


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


LENGTHS = {"max_response_length": 20480, "buffer_length": 4096}


def test_as_a_reward_function_it_reads_the_number_of_tokens() -> None:
    assert READS_LAST == 0
    assert compute_score("", "", "42", {"num_response_tokens": 18432}, **LENGTHS) == -0.5
    assert compute_score("", "", "42", {"num_response_tokens": 18432}, penalty_factor=2.0, **LENGTHS) == -1.0


@pytest.mark.parametrize(
    ("extra_info", "settings", "named"),
    [
        pytest.param({}, {}, r"`extra_info.num_response_tokens` \(None\)", id="no-length"),
        pytest.param(None, {}, r"`extra_info.num_response_tokens` \(None\)", id="nothing"),
        pytest.param({"num_response_tokens": "5"}, {}, r"num_response_tokens` \(5\)", id="a-text"),
        pytest.param({"num_response_tokens": 5}, {"buffer_length": 0}, r"`buffer_length` \(0\)", id="no-buffer"),
        pytest.param({"num_response_tokens": 5}, {"buffer_length": 20481}, r"\(20481\).*\(20480\)", id="long-buffer"),
        pytest.param({"num_response_tokens": 5}, {"penalty_factor": -1.0}, r"`penalty_factor` \(-1.0\)", id="a-bonus"),
        pytest.param({"num_response_tokens": 5}, {"penalty_factor": math.nan}, r"`penalty_factor` \(nan\)", id="nan"),
    ],
)
def test_settings_out_of_range(extra_info: Any, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        compute_score("", "", "42", extra_info, **{**LENGTHS, **settings})


@pytest.mark.parametrize("settings", [{}, {"penalty_factor": 0.25}, {"buffer_length": 20480}], ids=str)
def test_every_canary_holds(settings: dict[str, Any]) -> None:
    kwargs = {**LENGTHS, **settings}
    known = list(canaries("compute_score", kwargs))
    assert [compute_score("", text, truth, info, **kwargs) for text, truth, info, _ in known] == [k[3] for k in known]
    assert len({each[3] for each in known}) == 2


def test_canaries_need_the_lengths() -> None:
    with pytest.raises(ValueError, match="max_response_length and buffer_length"):
        list(canaries("compute_score", {}))
