"""A judge that a run does not start itself is asked once before the run: without it every response is unscorable."""

import pytest

from dapo.config.compose import compose
from dapo.doctor.before_run import check_machine
from dapo.doctor.checks import CHECKS, diagnose
from dapo.doctor.finding import FAULT, OK, WARNING, Finding
from dapo.doctor.machines import ThisMachine
from dapo.doctor.subject import Subject
from tests.support.rewards.judge_server import KEY, judge_server

NOBODY = "http://127.0.0.1:1/v1"
PROMPT = "reward.judge.prompt='{ground_truth}|{response}'"


def found(url: str, *overrides: str) -> Finding:
    judge = [f"reward.judge.url={url}", "reward.judge.model=m", "reward.remote.call_timeout_s=0.5", PROMPT]
    cfg = compose(["reward.functions=[{path: math},{path: judge}]", *judge, *overrides], "dapo_tiny", plan=True)
    [outcome] = diagnose(Subject(cfg), ThisMachine(), [check for check in CHECKS if check.name == "judge"])
    return outcome.finding


@pytest.mark.parametrize(
    ("options", "level", "parts"),
    [
        pytest.param({}, OK, ["answers", "a right sum 1"], id="well"),
        pytest.param({"always": "500"}, WARNING, ["answered 500"], id="busy"),
        pytest.param({"always": "no score"}, WARNING, ["has no score"], id="no score"),
        pytest.param(
            {"always": "silent"}, FAULT, ["no answer within 0.5 s", "reward.remote.call_timeout_s"], id="late"
        ),
        pytest.param({"key": KEY}, FAULT, ["answered 401", "reward.judge.key_variable"], id="without the key"),
    ],
)
def test_a_judge_with_an_address_is_asked(options: dict[str, str], level: str, parts: list[str]) -> None:
    with judge_server(**options) as server:
        said = found(server.url)
        assert sum(server.seen.values()) == (0 if "key" in options else 1)
    text = f"{said.found}; {said.remedy}"
    assert said.level == level and [part for part in parts if part not in text] == [], text


def test_nobody_at_the_address_of_a_source_ends_the_run_before_a_worker_starts() -> None:
    source = "data.sources=[{name: a, files: [b.jsonl], functions: [{path: judge}]}]"
    judge = [f"reward.judge.url={NOBODY}", "reward.judge.model=m", PROMPT]
    cfg = compose(["data.train_files=[]", source, *judge], "dapo_tiny")
    with pytest.raises(
        ValueError, match=r"(?s)judge: the judge at http://127.0.0.1:1/v1 .*ConnectError.*preflight=false"
    ):
        check_machine(cfg, lambda line: None)


@pytest.mark.parametrize("overrides", [["reward.functions=[{path: math}]"], ["reward.judge.key_variable=NO_SUCH_ONE"]])
def test_one_that_is_not_asked_or_cannot_be_is_left_alone(overrides: list[str]) -> None:
    """What is wrong with the other keys `settings` tells."""
    with judge_server() as server:
        assert found(server.url, *overrides) == Finding(OK, "no judge with an address of its own is asked")
        assert not server.seen
