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
            ["reward.functions=[{path: dapo.rewards.math, name: compute_scores}]"],
            ["reward.functions[0].name", "compute_score"],
            id="reward function misspelt",
        ),
        pytest.param(
            ["reward.functions=[{path: math, kwargs: {depth: 3}}]"],
            ["reward.functions[0]", "cannot be called", "depth"],
            id="reward kwargs that the function does not know",
        ),
        pytest.param(
            ["reward.functions=[{path: format, kwargs: {think: a, answer: a}}]"],
            ["reward.functions[0].kwargs", "think"],
            id="reward kwargs that do not go together",
        ),
        pytest.param(
            ["reward.functions=[{path: math}, {path: format, weight: -1.0}]"],
            ["reward.functions[1].wrong", "pay"],
            id="a limit that pays",
        ),
        pytest.param(
            ["reward.functions=[{path: math}, {path: overlong, kwargs: {max_response_length: 9, buffer_length: 3}}]"],
            ["overlong", "reward.overlong_buffer.enable"],
            id="overlong twice",
        ),
        pytest.param(
            ["reward.limits.cpu_s=8"], ["reward.limits.wall_s", "(10)", "(8)"], id="a cpu limit that is never reached"
        ),
        pytest.param(["reward.timeout_s=20"], ["reward.timeout_s", "twice", "(10)"], id="a silence below a verdict"),
        pytest.param(["reward.children_per_worker=0"], ["reward.children_per_worker", "at least 1"], id="no children"),
        pytest.param(
            ["reward.functions=[{path: /no/such.py, name: f}]"],
            ["reward.functions[0].path", "/no/such.py"],
            id="no file",
        ),
    ],
)
def test_bad_values_are_named(overrides, parts):
    with pytest.raises(ValueError) as error:
        compose(overrides, "dapo_tiny")
    for part in parts:
        assert part in str(error.value)
