"""Child processes that are killed, cancelled, left in a bad state or score known answers wrong."""

import asyncio
import os
import signal
import time

import pytest

from dapo.workers.scoring import children as module
from dapo.workers.scoring.verdict import CanaryError, ChildrenLost
from tests.support.rewards.reward_children import item, runs, use
from tests.support.rewards.reward_programs import CANARIES, PROGRAM


def test_memory_that_others_left_behind_makes_no_response_wrong(program):
    async def body(children):
        return [await children.score(item("keep 100")) for _ in range(6)], children.respawned

    verdicts, respawned = use(program, body)
    assert [verdict.score.accuracy for verdict in verdicts] == [1.0] * 6
    assert respawned >= 2


def test_what_a_function_was_allowed_to_start_ends_with_its_child(program, tmp_path):
    async def body(children):
        await children.score(item(f"hold {tmp_path / 'pid'}"))
        return int((tmp_path / "pid").read_text())

    started = use(program, body, allow_processes=True, wall_s=1.0)
    deadline = time.monotonic() + 5
    while runs(started):
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.02)


def test_a_thread_that_goes_on_costs_the_next_response_nothing(program):
    async def body(children):
        left = await children.score(item("linger"))
        await asyncio.sleep(0.1)
        return left, await children.score(item("pause 1")), children.respawned

    left, after, respawned = use(program, body, cpu_s=0.2)
    assert (left.score.accuracy, after.score.accuracy, after.score.failure, respawned) == (1.0, 1.0, "", 1)


def test_idle_threads_of_a_function_cost_nothing(program):
    async def body(children):
        verdicts = [await children.score(item(text)) for text in ("idle", "7", "idle", "spin")]
        return verdicts, children.respawned

    verdicts, respawned = use(program, body, cpu_s=0.3)
    assert [verdict.score.failure for verdict in verdicts] == ["", "", "", "cpu"]
    assert respawned == 2, "the limit was reached a second time, in a fresh process"


def test_one_that_hangs_holds_up_no_other(program):
    async def body(children):
        hanging = asyncio.ensure_future(children.score(item("hang")))
        others = [await children.score(item("7")) for _ in range(20)]
        assert not hanging.done()
        return await hanging, others

    hanging, others = use(program, body, count=2)
    assert hanging.score.failure == "wall"
    assert all(other.score.accuracy == 1.0 for other in others)


LIMITED = """
import os

fork = os.fork


def limited():
    if os.path.exists({full!r}):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()


os.fork = limited  # in the fork server, which imports this file
"""


def test_no_process_to_be_had_for_a_moment_costs_no_verdict(tmp_path):
    full, file = tmp_path / "full", tmp_path / "limited.py"
    file.write_text(PROGRAM + LIMITED.format(full=str(full)))

    async def body(children):
        server = children.about["pid"]
        full.touch()
        [child] = children.pids
        os.kill(child, signal.SIGKILL)
        while children.pids:
            await asyncio.sleep(0.02)
        scoring = asyncio.ensure_future(children.score(item("7")))
        await asyncio.sleep(2)
        full.unlink()
        return await scoring, children.about["pid"] == server

    verdict, same = use(str(file), body)
    assert verdict.score.accuracy == 1.0 and same, "nor does the fork server end"


@pytest.mark.parametrize("victim", ["child", "clean"])
def test_a_killed_process_is_replaced(program, victim):
    async def body(children):
        waiting = [asyncio.ensure_future(children.score(item("pause 0.5"))) for _ in range(2)]
        await asyncio.sleep(0.2)
        for pid in children.pids if victim == "child" else [children.about["pid"]]:
            os.kill(pid, signal.SIGKILL)
        lost = await asyncio.gather(*waiting)
        found = await asyncio.gather(*[children.score(item("7")) for _ in range(10)])
        while len(children.pids) < 2:
            await asyncio.sleep(0.02)
        return lost, found

    lost, found = use(program, body, count=2)
    assert {verdict.score.failure for verdict in lost} == {"crash"}
    assert all(verdict.score.accuracy == 1.0 for verdict in found)


def test_a_child_killed_while_idle_costs_no_response(program):
    async def body(children):
        os.kill(children.pids[0], signal.SIGKILL)
        await asyncio.sleep(0.3)
        return await children.score(item("7")), children.respawned

    verdict, respawned = use(program, body)
    assert (verdict.score.accuracy, respawned) == (1.0, 1)


def test_a_cancelled_caller_leaves_the_child_to_others(program):
    async def body(children):
        gone = asyncio.ensure_future(children.score(item("pause 0.3")))
        never = asyncio.ensure_future(children.score(item("hang")))
        await asyncio.sleep(0.1)
        gone.cancel()
        never.cancel()  # not begun: it is left out
        return await children.score(item("7")), children.respawned

    verdict, respawned = use(program, body)
    assert (verdict.score.accuracy, verdict.score.failure, respawned) == (1.0, "", 0)


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


def test_a_child_that_scores_everything_zero_is_found_before_the_next_step_or_after_a_while(tmp_path, monkeypatch):
    file = tmp_path / "counting.py"
    file.write_text(COUNTING + CANARIES)

    async def checked(children):
        await asyncio.gather(*[children.score(item("7")) for _ in range(20)])
        await children.check()
        await children.score(item("break"))
        with pytest.raises(CanaryError, match="known answer"):
            await children.check()
        with pytest.raises(CanaryError):
            await children.score(item("7"))

    use(str(file), checked, count=2)

    async def unchecked(children):
        await children.score(item("break"))
        for _ in range(20):
            await children.score(item("7"))

    monkeypatch.setattr(module, "CANARY_EVERY", 10)
    with pytest.raises(CanaryError, match=r"`compute_score` gave -1.0 for a known answer whose score is 1.0.*'7'"):
        use(str(file), unchecked)


GIVES = "def canaries(name, kwargs):\n    yield "


@pytest.mark.parametrize(
    ("extra", "error", "told"),
    [
        pytest.param(f"{GIVES}'7', '7', {{}}, -1.0\n", CanaryError, "gave 1.0", id="wrong"),
        pytest.param(f"{GIVES}'none', '7', {{}}, 1.0\n", CanaryError, "gave nan", id="none"),
        pytest.param(f"{GIVES}'raise x', '7', {{}}, 1.0\n", CanaryError, "KeyError", id="raises"),
        pytest.param(f"{GIVES}'exit', '7', {{}}, 1.0\n", ChildrenLost, "did not come to", id="dies"),
        pytest.param(f"{GIVES}1\n", ValueError, "functions[0].path", id="no-canaries"),
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
