"""Bad configuration of rewards: every problem is named with key, value and remedy before anything starts."""

import pytest

from dapo.config.compose import compose


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        pytest.param(
            ["reward.overlong_buffer.len=128"],
            ["reward.overlong_buffer.len", "128", "data.max_response_length", "lower the buffer"],
            id="overlong buffer as long as the cap",
        ),
        pytest.param(
            ["reward.limits.cpu_s=8"], ["reward.limits.wall_s", "(10)", "(8)"], id="a cpu limit that is never reached"
        ),
        pytest.param(["reward.timeout_s=20"], ["reward.timeout_s", "twice", "(10)"], id="a silence below a verdict"),
        pytest.param(["reward.children_per_worker=0"], ["reward.children_per_worker", "at least 1"], id="no children"),
    ],
)
def test_bad_values_are_named(overrides, parts):
    with pytest.raises(ValueError) as error:
        compose(overrides, "dapo_tiny")
    for part in parts:
        assert part in str(error.value)
