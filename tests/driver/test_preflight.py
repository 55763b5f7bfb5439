"""What only trying can tell: every problem is named with key, value and remedy before any worker starts."""

from importlib import metadata
from pathlib import Path

import pytest

from dapo.config.compose import compose
from dapo.driver.preflight import preflight


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        pytest.param(
            ["actor.optim.lr_scheduler=cosine", "actor.optim.lr_scheduler_kwargs.num_cycels=1"],
            ["`actor.optim.lr_scheduler_kwargs` ({'num_cycels': 1})", "(cosine)", "'num_cycels'"],
            id="argument of the schedule",
        ),
        pytest.param(
            ["actor.optim.lr_scheduler=cosine_with_min_lr"],
            ["`actor.optim.lr_scheduler_kwargs` ({})", "(cosine_with_min_lr)", "min_lr"],
            id="argument of the schedule missing",
        ),
        pytest.param(
            ["model.attn_implementation=flsh"],
            ["`model.attn_implementation` (flsh)", "auto", "sdpa"],
            id="attention misspelt",
        ),
        pytest.param(
            ["actor.optim.lr_scheduler=polynomial", "actor.optim.lr_scheduler_kwargs.power='2'"],
            ["`actor.optim.lr_scheduler_kwargs` ({'power': '2'})", "(polynomial)", "cannot be computed", "numbers"],
            id="argument of the schedule that is used after the warm-up",
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
            ["reward.functions=[{path: judge}]", "reward.judge.pattern='Score: [0-9'"],
            ["reward.judge.url", "http://HOST", "reward.judge.model", "reward.judge.pattern", "no regular expression"],
            id="a judge without an address",
        ),
        pytest.param(
            [
                "reward.functions=[{path: judge, kwargs: {url: 'http://127.0.0.1:1/v1', model: m, prompt: '?'}}]",
                *(
                    "reward.judge.pattern='[0-9]'",
                    "reward.judge.lowest=1",
                    "reward.judge.key_variable=NO_SUCH_VARIABLE",
                ),
            ],
            ["{response}", "a group", "reward.judge.lowest", "NO_SUCH_VARIABLE, which is not set"],
            id="a judge that cannot be read",
        ),
        pytest.param(
            ["reward.functions=[{path: code}]", "reward.limits.sandbox.packages=[nmpy]"],
            ["`reward.limits.sandbox.packages` names 'nmpy'", "no package that is installed"],
            id="a package of the sandbox misspelt",
        ),
        pytest.param(
            [
                "rollout.function.path=tool_use",
                "rollout.function.kwargs.python=true",
                "reward.limits.sandbox.packages=[nmpy]",
            ],
            ["`reward.limits.sandbox.packages` names 'nmpy'"],
            id="a package for the policy's programs misspelt",
        ),
        pytest.param(
            ["rollout.function.path=tool_use", "rollout.function.kwargs.max_calls=many"],
            ["`rollout.function.kwargs.max_calls` (many) must be a whole number"],
            id="a ready rollout function's argument",
        ),
        pytest.param(
            ["rollout.function.path=tool_use", "rollout.function.kwargs.python=1"],
            ["`rollout.function.kwargs.python` (1) must be true or false"],
            id="a ready rollout function's switch",
        ),
        pytest.param(
            ["reward.functions=[{path: /no/such.py, name: f}]"],
            ["reward.functions[0].path", "/no/such.py"],
            id="no file",
        ),
    ],
)
def test_bad_values_are_named(overrides, parts):
    with pytest.raises(ValueError) as error:
        preflight(compose(overrides, experiment="dapo_tiny"))
    for part in parts:
        assert part in str(error.value)


def test_a_key_that_no_header_may_hold_is_named_and_not_shown(monkeypatch):
    judge = "reward.functions=[{path: judge, kwargs: {url: 'http://127.0.0.1:1/v1', model: m}}]"
    cfg = compose([judge, "reward.judge.key_variable=JUDGE_API_KEY"], experiment="dapo_tiny")
    monkeypatch.setenv("JUDGE_API_KEY", "s3cr3t\n")  # as a file holds it
    preflight(cfg)
    monkeypatch.setenv("JUDGE_API_KEY", "s3cr3t\nand another")
    with pytest.raises(ValueError, match="names JUDGE_API_KEY, which holds a character that no header may") as error:
        preflight(cfg)
    assert "s3cr3t" not in str(error.value)


def test_calls_further_apart_than_a_worker_may_be_silent_are_named(tmp_path: Path) -> None:
    """All async functions of a worker share its calls; those that ask nobody make none."""
    (tmp_path / "mine.py").write_text("async def compute_score(data_source, solution_str, ground_truth, extra_info): 0")
    asks = f"{{path: {tmp_path / 'mine.py'}}}"
    judge = "{path: judge, kwargs: {url: 'http://127.0.0.1:1/v1', model: m}}"
    rate = ["reward.remote.calls_per_minute=1200", "reward.num_workers=2", "reward.timeout_s=80"]
    preflight(compose([*rate, f"reward.functions=[{judge}, {{path: math}}]"], experiment="dapo_tiny"))
    preflight(compose(["reward.remote.calls_per_minute=1"], experiment="dapo_tiny"))
    with pytest.raises(ValueError) as error:
        preflight(compose([*rate, f"reward.functions=[{judge}, {asks}]"], experiment="dapo_tiny"))
    for part in (
        "`reward.timeout_s` (80)",
        "(45)",
        "the 44.8 s in which a worker makes its 448 calls",
        "functions, 2)",
    ):
        assert part in str(error.value)


def test_all_problems_come_at_once():
    overrides = ["reward.functions=[{path: /no/such.py}, {path: maths}]", "actor.optim.lr_scheduler=cosine_with_min_lr"]
    with pytest.raises(ValueError) as error:
        preflight(compose(overrides, experiment="dapo_tiny"))
    assert len(str(error.value).splitlines()) == 3


def test_torchvision_built_for_cuda_next_to_a_cpu_torch(monkeypatch):
    """It is named instead of the import of transformers that it breaks."""
    cfg = compose(["actor.optim.lr_scheduler=cosine_with_min_lr"], experiment="dapo_tiny")
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    with pytest.raises(ValueError, match=r"^torchvision 0\.28\.0 .*pip uninstall torchvision`$"):
        preflight(cfg)
    versions["torchvision"] = "0.28.0+cpu"
    with pytest.raises(ValueError, match="lr_scheduler_kwargs"):
        preflight(cfg)
