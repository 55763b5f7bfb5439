"""Choices of the objective beyond DAPO's: values that are not allowed, and those that do not go together."""

import pytest

from dapo.config.compose import compose

CORRECTION = "algorithm.rollout_correction"
GEOMETRIC = [f"{CORRECTION}.mode=mask", f"{CORRECTION}.level=geometric"]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        pytest.param(
            GEOMETRIC, [f"`{CORRECTION}.upper` (2.0)", "geometric", "1.001", "0.999"], id="bounds of single tokens"
        ),
        pytest.param(
            ["algorithm.advantage.function=reinforce_plus_plus", "algorithm.advantage.whiten=true"],
            ["`algorithm.advantage.whiten` (true)", "reinforce_plus_plus", "set it to false"],
            id="normalized twice",
        ),
        pytest.param(
            ["filter_groups.function=my.py:keep", "filter_groups.enable=false"],
            ["`filter_groups.function` (my.py:keep)", "`filter_groups.enable`", "set that to true"],
            id="a filter that is not asked",
        ),
        pytest.param(
            ["algorithm.advantage.function=gae"],
            ["`algorithm.advantage.function` (gae)", "group, rloo, reinforce_plus_plus, gdpo, or FILE.py:FUNCTION"],
            id="unknown advantage",
        ),
        pytest.param(
            ["algorithm.policy_loss=my.py"], ["`algorithm.policy_loss` (my.py)", "FILE.py:FUNCTION"], id="no function"
        ),
        pytest.param(
            ["algorithm.token_weights=token-mean"],
            ["`algorithm.token_weights` (token-mean)", "empty, or FILE.py:FUNCTION"],
            id="weights by a name",
        ),
        pytest.param(
            ["algorithm.entropy_top_share=0"],
            ["`algorithm.entropy_top_share` (0.0)", "above 0 and at most 1", "0.2 is the published"],
            id="no token left",
        ),
    ],
)
def test_each_problem_is_one_line_with_key_value_and_remedy(overrides, parts):
    with pytest.raises(ValueError) as error:
        compose(overrides, "dapo_tiny")
    (line,) = str(error.value).splitlines()
    assert [part for part in parts if part not in line] == []


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([*GEOMETRIC, f"{CORRECTION}.lower=0.999", f"{CORRECTION}.upper=1.001"], id="geometric"),
        pytest.param([f"{CORRECTION}.level=geometric"], id="a level without a correction"),
        pytest.param(["algorithm.advantage.function=gdpo", "algorithm.advantage.whiten=true"], id="gdpo"),
        pytest.param(["algorithm.policy_loss=some/folder/my.py:loss_2"], id="own loss"),
        pytest.param(["algorithm.entropy_top_share=0.2"], id="high entropy"),
    ],
)
def test_these_go_together(overrides):
    compose(overrides, "dapo_tiny")
