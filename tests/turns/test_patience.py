"""Many calls of a function that want the interpreter at once: who waits for a place has not run out of time."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dapo.sandbox import client
from dapo.sandbox.program import Outcome, Program
from dapo.turns.interpreter import run
from dapo.turns.protocol import Failed, Queued, Step, Trajectory
from dapo.turns.session import Session
from tests.support.engines.functions import TOKENIZER
from tests.support.fakes import make_prompt

CALLS, PROGRAM_S, TIMEOUT_S = 4, 0.3, 0.8  # one process: the last program begins when the time of its call is up


def outcome_of(program: Program) -> Outcome:
    time.sleep(PROGRAM_S)
    return Outcome(stdout=program.source, stderr="", result="", exit=0, reason="", cpu_s=0.0, wall_s=PROGRAM_S)


async def asks_the_interpreter(prompt: Any, generate: Any, sampling: Any) -> Trajectory:
    return Trajectory(text=(await run(Program(source="6 * 7"))).stdout)


def ends(function: Callable[..., Awaitable[Any]], calls: int = 1) -> list[tuple[Step, int]]:
    """How each call ends, and how often it was asked again before."""

    async def play() -> list[tuple[Step, int]]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        sessions = [Session(function, {}, make_prompt(1), None, TOKENIZER) for _ in range(calls)]
        return list(await asyncio.gather(*[followed(session) for session in sessions]))

    async def followed(session: Session) -> tuple[Step, int]:
        again = 0
        while isinstance(step := await session.step(TIMEOUT_S), Queued):
            again += 1
        session.close()
        return step, again

    return asyncio.run(play())


def test_a_program_that_runs_too_long_uses_the_time_up(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(client, "run", lambda program: over.wait(10))

    async def hangs(prompt: Any, generate: Any, sampling: Any) -> None:
        try:
            await run(Program(source=""))
        finally:
            over.set()

    [(step, again)] = ends(hangs)
    assert isinstance(step, Failed) and "did not go on within 0.8 s" in step.detail and again == 0


def test_who_waits_for_a_place_has_its_time_left_however_long_that_takes(monkeypatch):
    monkeypatch.setattr(client, "run", outcome_of)
    found = ends(asks_the_interpreter, CALLS)
    assert [step for step, _ in found] == [Trajectory(text="6 * 7")] * CALLS
    assert max(again for _, again in found) >= 1, "nobody waited: the test shows nothing"


def test_what_is_cancelled_while_it_waits_never_runs(monkeypatch):
    ran: list[str] = []

    def noted(program: Program) -> Outcome:
        ran.append(program.source)
        return outcome_of(program)

    monkeypatch.setattr(client, "run", noted)

    async def play() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        first, second = (asyncio.create_task(run(Program(source=name))) for name in ("first", "second"))
        await asyncio.sleep(PROGRAM_S / 3)
        second.cancel()
        await asyncio.wait({first, second})

    asyncio.run(play())
    assert ran == ["first"]
