"""What is said of a judge that the run starts itself, before any worker starts."""

from typing import Any

import pytest

from dapo.config import fields
from dapo.config.compose import compose
from dapo.config.reward import JudgeConfig, JudgeEngineConfig, RewardFunctionConfig
from dapo.config.rules.judge import judge
from dapo.config.schema import Config
from dapo.driver.preflight import preflight
from dapo.rewards.calling.loading import OWN, OWN_MODEL, load, with_judge
from dapo.rewards.judge import problems as judge_problems

BASE = "pkg://dapo.tiny/base"


def problems(asked: bool = True, **settings: Any) -> list[str]:
    """settings: of `reward.judge.engine`, or `url`."""
    cfg = Config()
    cfg.reward.functions = [RewardFunctionConfig(path="judge" if asked else "math")]
    cfg.reward.judge.url = settings.pop("url", "")
    cfg.reward.judge.engine = JudgeEngineConfig(**{"path": BASE, **settings})
    return [*fields.problems(cfg), *judge(cfg)]


def test_nothing_is_said_of_a_good_one() -> None:
    assert problems() == []
    assert problems(path="owner/judge", vllm={"tensor_parallel_size": 2}, node_labels={"pool": "judge"}) == []
    assert problems(path="", asked=False) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"path": "/no/such/judge"}, "`reward.judge.engine.path` (/no/such/judge) does not exist", id="path"
        ),
        pytest.param({"path": "nope"}, "`reward.judge.engine.path` (nope): no such directory in ", id="no-directory"),
        pytest.param({"path": "pkg://dapo.tiny/data"}, "(pkg://dapo.tiny/data) holds no config.json", id="no-model"),
        pytest.param(
            {"vllm": {"tensor_parallel_size": 3}},
            "`reward.judge.engine.vllm.tensor_parallel_size` (3) must divide the 4 attention heads of "
            "`reward.judge.engine.path` (pkg://dapo.tiny/base)",
            id="heads",
        ),
        pytest.param(
            {"vllm": {"pipeline_parallel_size": 5, "enforce_eager": False}},
            "`reward.judge.engine.vllm.pipeline_parallel_size` (5) must be at most 4, the layers of "
            "`reward.judge.engine.path` (pkg://dapo.tiny/base)",
            id="layers",
        ),
        pytest.param(
            {"vllm": {"max_model_len": 5000}},
            "`reward.judge.engine.vllm.max_model_len` (5000) must be at most 4096, the positions that "
            "`reward.judge.engine.path` (pkg://dapo.tiny/base) has",
            id="positions",
        ),
        pytest.param({"url": "http://a/v1"}, "`reward.judge.url` (http://a/v1) names a judge, and", id="both"),
        pytest.param({"asked": False}, "no entry of `reward.functions` asks it; add {path: judge", id="not-asked"),
        pytest.param({"vllm": {"model": "x"}}, "`reward.judge.engine.vllm.model` is set by dapo", id="own-argument"),
        pytest.param(
            {"vllm": {"max_modl_len": 9}}, "`reward.judge.engine.vllm.max_modl_len` is no engine argument", id="typo"
        ),
        pytest.param({"num_engines": 0}, "`reward.judge.engine.num_engines` (0) must be", id="none"),
        pytest.param({"node_labels": {"a b": "c"}}, "`reward.judge.engine.node_labels`", id="labels"),
    ],
)
def test_a_problem_is_named(settings: dict[str, Any], message: str) -> None:
    [problem] = problems(**settings)
    assert message in problem


def test_the_command_line_takes_its_keys_and_preflight_lets_it_pass() -> None:
    keys = ["reward.functions=[{path: judge, wrong: 0.0}]", f"reward.judge.engine.path={BASE}"]
    cfg = compose([*keys, "+reward.judge.engine.vllm.max_model_len=512"], "dapo_tiny")
    assert cfg.reward.judge.engine.vllm == {"max_model_len": 512}
    preflight(cfg)
    with pytest.raises(ValueError, match=r"`reward.judge.url` \(''\).*reward.judge.engine.path"):
        preflight(compose(keys[:1], "dapo_tiny"))


def test_the_function_asks_the_judge_of_the_run() -> None:
    own = JudgeConfig(engine=JudgeEngineConfig(path=BASE))
    [spec] = with_judge([RewardFunctionConfig(path="judge")], own)
    assert (spec.kwargs["url"], spec.kwargs["model"]) == (OWN, OWN_MODEL) and "engine" not in spec.kwargs
    assert list(judge_problems(load(spec).kwargs)) == []
    elsewhere = RewardFunctionConfig(path="judge", kwargs={"url": "http://a/v1", "model": "m"})
    assert with_judge([elsewhere], own)[0].kwargs["url"] == "http://a/v1"


def test_a_value_that_is_no_score_is_refused() -> None:
    """It would be asked for again until the response is unscorable, and groups would have right answers alone."""
    kwargs = with_judge(
        [RewardFunctionConfig(path="judge")], JudgeConfig(url="http://a/v1", model="m", values={"yes": 1, "no": -1})
    )[0].kwargs
    [found] = judge_problems(kwargs)
    assert found.startswith("`reward.judge.values.no` (-1) is outside of") and "(0 to 1)" in found
    assert [*judge_problems({**kwargs, "lowest": -1.0})] == []
