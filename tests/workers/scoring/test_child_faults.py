"""Child processes that are killed, cancelled or left in a bad state by one response: the others lose nothing."""

import asyncio
import os
import signal
import time

import pytest

from tests.support.rewards.reward_children import item, runs, use


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
        return left, await children.score(item("pause 2")), children.respawned

    left, after, respawned = use(program, body, cpu_s=0.2)
    assert (left.score.accuracy, after.score.accuracy, after.score.failure, respawned) == (1.0, 1.0, "", 1)


def test_idle_threads_of_a_function_cost_nothing(program):
    async def body(children):
        verdicts = [await children.score(item(text)) for text in ("idle", "7", "idle", "spin")]
        return verdicts, children.respawned

    verdicts, respawned = use(program, body, cpu_s=0.3)
    assert [verdict.score.failure for verdict in verdicts] == ["", "", "", "cpu"]
    assert respawned == 2, "the limit was reached a second time, in a fresh process"


def test_a_fork_that_holds_the_socket_hides_no_limit(program):
    async def body(children):
        return await children.score(item("forkspin")), await children.score(item("7"))

    verdict, after = use(program, body, allow_processes=True, wall_s=4.0)
    assert (verdict.score.failure, after.score.accuracy) == ("cpu", 1.0)


def test_many_children_start_and_come_back(program):
    async def body(children):
        assert len(children.pids) == 8
        os.kill(children.about["pid"], signal.SIGKILL)
        await asyncio.sleep(0.3)
        verdicts = await asyncio.gather(*[children.score(item("7")) for _ in range(40)])
        while len(children.pids) < 8:
            await asyncio.sleep(0.02)
        return verdicts

    assert sum(verdict.score.accuracy == 1.0 for verdict in use(program, body, count=8)) >= 32


def test_a_response_at_the_memory_limit_is_not_lost_with_the_next_child(program):
    """It has its verdict from a later child, or fell with the one that had begun with it; and scoring goes on."""

    async def body(children):
        await children.score(item("keep 200"))
        first, killed = set(children.pids), set()
        again = asyncio.ensure_future(children.score(item("keep 200")))  # too much for this one, not for a fresh one
        while not again.done() and len(killed) < 2:
            for pid in set(children.pids) - first - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            await asyncio.sleep(0)
        return killed, await again, await children.score(item("7"))

    killed, verdict, after = use(program, body)
    assert killed, "a successor was there to be killed"
    assert (verdict.score.failure, verdict.score.accuracy) == ("", 1.0) or verdict.score.failure == "crash"
    assert after.score.accuracy == 1.0


def test_one_that_hangs_holds_up_no_other(program):
    async def body(children):
        hanging = asyncio.ensure_future(children.score(item("hang")))
        others = [await children.score(item("7")) for _ in range(20)]
        assert not hanging.done()
        return await hanging, others

    hanging, others = use(program, body, count=2)
    assert hanging.score.failure == "wall"
    assert all(other.score.accuracy == 1.0 for other in others)


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
