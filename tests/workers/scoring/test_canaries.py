"""Known answers: functions and processes that score them wrong are found, at the start and later."""

import asyncio
import os
import signal

import pytest

from tests.support.rewards.reward_children import item, use
from tests.support.rewards.reward_programs import CANARIES, PROGRAM
from workers.scoring import children as module
from workers.scoring.verdict import CanaryError


def test_a_function_that_is_edited_during_a_run_stops_it(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PROGRAM + CANARIES)

    async def body(children):
        file.write_text(PROGRAM + CANARIES + "# another\n")
        os.kill(children.about["pid"], signal.SIGKILL)
        with pytest.raises(CanaryError, match="changed during the run"):
            while True:
                await children.score(item("7"))

    use(str(file), body)


COUNTING = """
calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    if solution_str == "break":
        calls = 10**9
    right = solution_str == ground_truth and calls < 10**9
    return 1.0 if right else -1.0
"""


def test_a_child_that_scores_everything_zero_is_found_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CANARY_EVERY", 10)
    file = tmp_path / "counting.py"
    file.write_text(COUNTING + CANARIES)

    async def body(children):
        await children.score(item("break"))
        for _ in range(20):
            await children.score(item("7"))

    with pytest.raises(CanaryError, match=r"`compute_score` gave -1.0 for a known answer whose score is 1.0.*'7'"):
        use(str(file), body)


def test_a_check_finds_it_before_the_next_optimizer_step(tmp_path):
    file = tmp_path / "counting.py"
    file.write_text(COUNTING + CANARIES)

    async def body(children):
        await asyncio.gather(*[children.score(item("7")) for _ in range(20)])
        await children.check()
        await children.score(item("break"))
        with pytest.raises(CanaryError, match="known answer"):
            await children.check()
        with pytest.raises(CanaryError):
            await children.score(item("7"))

    use(str(file), body, count=2)


@pytest.mark.parametrize(
    ("extra", "error", "told"),
    [
        pytest.param(
            "def canaries(name, kwargs):\n    yield '7', '7', {}, -1.0\n", CanaryError, "gave 1.0", id="wrong"
        ),
        pytest.param(
            "def canaries(name, kwargs):\n    yield 'none', '7', {}, 1.0\n", CanaryError, "gave nan", id="none"
        ),
        pytest.param(
            "def canaries(name, kwargs):\n    yield 'raise x', '7', {}, 1.0\n", CanaryError, "KeyError", id="raises"
        ),
        pytest.param(
            "def canaries(name, kwargs):\n    yield 'exit', '7', {}, 1.0\n", CanaryError, "did not come to", id="dies"
        ),
        pytest.param("def canaries(name, kwargs):\n    yield 1\n", ValueError, "functions[0].path", id="no-canaries"),
        pytest.param("1 / 0\n", ValueError, "ZeroDivisionError", id="does-not-load"),
    ],
)
def test_a_function_that_fails_its_own_known_answers_does_not_start(tmp_path, extra, error, told):
    file = tmp_path / "mine.py"
    file.write_text(PROGRAM + extra)

    async def body(children):
        raise AssertionError("started")

    with pytest.raises(error) as raised:
        use(str(file), body)
    assert told in str(raised.value)
