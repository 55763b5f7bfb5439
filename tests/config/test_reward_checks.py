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
        pytest.param(
            ["reward.functions=[{path: code, kwargs: {partail: true}}]"],
            ["`reward.functions[0].kwargs.partail`", "did you mean `partial`?"],
            id="no option of code",
        ),
        pytest.param(
            ["reward.functions=[{path: code, kwargs: {partial: 1}}]"],
            ["`reward.functions[0].kwargs.partial` (1)", "true or false"],
            id="no truth value",
        ),
        pytest.param(
            ["reward.functions=[{path: math}, {path: code, kwargs: {max_tests: -1}}]"],
            ["`reward.functions[1].kwargs.max_tests` (-1)", "whole number"],
            id="a negative number of tests",
        ),
        pytest.param(
            ["reward.functions=[{path: code}]", "reward.limits.sandbox.cpu_s=5"],
            ["`reward.limits.sandbox.cpu_s` (5)", "`reward.limits.sandbox.wall_s` (4)", "raise the latter"],
            id="a test longer than its wall-clock time",
        ),
        pytest.param(
            ["reward.functions=[{path: code}]", "reward.limits.sandbox.total_s=6"],
            ["`reward.limits.wall_s` (10)", "`reward.limits.sandbox.total_s` (6)", "lower the other"],
            id="tests longer than a response",
        ),
        pytest.param(
            ["reward.limits.sandbox.threads=0"], ["reward.limits.sandbox.threads", "at least 1"], id="no thread"
        ),
        pytest.param(
            ["reward.remote.timeout_s=60"],
            ["reward.remote.timeout_s", "reward.timeout_s", "(60)", "raise the one"],
            id="an answer that is waited for longer than for the worker",
        ),
        pytest.param(["reward.concurrency=0"], ["reward.concurrency", "at least 1"], id="no concurrency"),
        pytest.param(["reward.children_per_worker=0"], ["reward.children_per_worker", "at least 1"], id="no children"),
    ],
)
def test_bad_values_are_named(overrides, parts):
    with pytest.raises(ValueError) as error:
        compose(overrides, "dapo_tiny")
    for part in parts:
        assert part in str(error.value)
