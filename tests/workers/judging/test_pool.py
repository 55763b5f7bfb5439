"""The driver's side of the judges, with actors in this process and a program in place of vLLM's server."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from dapo.config.reward import JudgeEngineConfig
from workers import judge as module
from workers.judge import JudgePool, State
from workers.remote import RemoteError

pytestmark = pytest.mark.usefixtures("program")


class LocalActor:
    """Has the methods of an actor's handle; `kill` ends it as Ray does, with what it has started."""

    def __init__(self, kind: type) -> None:
        self.held, self.dead = kind(), False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.held, name)

        class Call:
            @staticmethod
            def remote(*arguments: Any) -> Any:
                return asyncio.ensure_future(self.answer(method(*arguments)))

        return Call

    async def answer(self, work: Any) -> Any:
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait({task}, timeout=0.02)
            if self.dead:
                task.cancel()
                raise RayActorError()
        if self.dead:
            raise RayActorError()
        try:
            return task.result()
        except RuntimeError as error:  # as `workers.remote.wait` makes of Ray's
            raise RemoteError(str(error)) from error

    def kill(self) -> None:
        self.dead = True
        self.held._server.kill()
        if task := getattr(self.held, "_task", None):  # it had started
            task.cancel()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> JudgePool:
    class Remote:
        def __init__(self, kind: type) -> None:
            self.remote = lambda: LocalActor(kind)
            self.options = lambda **_: self

    monkeypatch.setattr(module.ray, "remote", Remote)
    monkeypatch.setattr(module.ray, "kill", lambda handle: handle.kill())
    monkeypatch.setattr(module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    warnings: list[str] = []
    config = JudgeEngineConfig(path="judge", max_restarts=2)
    made = JudgePool(config, [{}, {}], device="cpu", warn=warnings.append)
    made.warnings = warnings  # type: ignore[attr-defined]
    return made


def run(pool: JudgePool, use: Any) -> None:
    async def whole() -> None:
        try:
            async with asyncio.timeout(120):
                await pool.start(60)
                await use()
        finally:
            pool.stop()

    asyncio.run(whole())


async def until(holds: Any) -> None:
    while not holds():
        await asyncio.sleep(0.02)


def test_a_server_that_is_lost_leaves_the_other_and_comes_back(pool: JudgePool) -> None:
    async def use() -> None:
        both = pool.servers()
        assert len({server["url"] for server in both}) == len({server["key"] for server in both}) == 2
        os.kill(pool._places[0].handle.held._server.pid, signal.SIGKILL)
        await until(lambda: pool.servers() == both[1:])
        await until(lambda: pool.servers() == [{**both[0], "start": "1"}, both[1]])
        assert both[0]["start"] == "0" and pool.restarts == 1 and not pool.failure
        assert pool.warnings == ["judge 0 is lost, and its server is started again (restart 1)"]  # type: ignore[attr-defined]

    run(pool, use)


def test_an_actor_that_is_lost_is_replaced(pool: JudgePool) -> None:
    async def use() -> None:
        both = pool.servers()
        pool._places[1].handle.kill()
        await until(lambda: pool.restarts == 1 and len(pool.servers()) == 2)
        assert pool.servers()[0] == both[0] and pool.servers()[1]["key"] != both[1]["key"]
        assert "judge 1 is replaced" in pool.warnings[0]  # type: ignore[attr-defined]

    run(pool, use)


def test_who_asks_while_all_judges_are_replaced_waits_for_one(pool: JudgePool) -> None:
    async def use() -> None:
        before = pool.servers()
        for place in pool._places:
            place.handle.kill()
        await until(lambda: pool.servers() == [])
        now = await pool.there()
        assert now and not any(server["key"] in {each["key"] for each in before} for server in now)

    run(pool, use)


def test_who_asks_while_all_servers_start_again_waits_for_one_and_sees_that_it_did(pool: JudgePool) -> None:
    async def use() -> None:
        before = pool.servers()
        for place in pool._places:
            os.kill(place.handle.held._server.pid, signal.SIGKILL)
        await until(lambda: pool.servers() == [])
        found = await asyncio.gather(*[pool.there() for _ in range(3)])
        assert found[0] == found[1] == found[2] and found[0]
        assert all({**server, "start": "0"} in before and server["start"] == "1" for server in found[0])

    run(pool, use)


def test_who_was_not_answered_hears_whether_the_judges_stand_still(pool: JudgePool, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.05)
    pool._config.silence_s = 4.0

    async def use() -> None:
        before = pool.servers()
        await pool.heard()
        assert pool.servers() == before and pool.restarts == 0
        os.kill(pool._places[0].handle.held._server.pid, signal.SIGSTOP)
        await pool.heard()
        await until(lambda: len(pool.servers()) == 2)
        assert pool.restarts == 1

    run(pool, use)


def test_who_was_not_answered_hears_that_a_judge_is_given_up(pool: JudgePool) -> None:
    async def use() -> None:
        first, second = pool._places
        first.state = State(url="http://a/v1", key="k", up=True, answered=3, restarts=0, failure="")
        hearing = asyncio.create_task(pool.heard())
        await asyncio.wait({hearing}, timeout=0.02)
        assert not hearing.done()
        pool._give_up(first, "lost too often")
        await hearing
        await pool.heard()  # of the other, which loads, nothing is to be heard

    asyncio.run(asyncio.wait_for(use(), 60))


def test_a_judge_that_is_given_up_does_not_end_the_run_while_another_is_replaced(pool: JudgePool) -> None:
    async def use() -> None:
        first, second = pool._places
        first.state = None  # it loads
        pool._give_up(second, "lost too often")
        assert not pool.failure
        pool._give_up(first, "lost too often")
        assert "no judge is left" in pool.failure and await pool.there() == []

    run(pool, use)


def test_an_actor_that_looks_after_its_server_no_more_is_replaced(pool: JudgePool, monkeypatch: Any) -> None:
    """Where the disk is full, say, the server cannot be started again."""
    monkeypatch.setattr(module, "POLL_S", 0.05)

    async def use() -> None:
        async def ended() -> None:
            raise TypeError("a defect")

        pool._places[1].handle.held._task.cancel()
        pool._places[1].handle.held._task = asyncio.create_task(ended())
        await until(lambda: pool.restarts == 1 and len(pool.servers()) == 2)
        assert "its server is kept up no more: TypeError: a defect" in pool.warnings[0]  # type: ignore[attr-defined]

    run(pool, use)


def test_the_run_ends_where_no_judge_is_left(pool: JudgePool, program: Path) -> None:
    async def use() -> None:
        (program / "broken").touch()
        os.kill(pool._places[0].handle.held._server.pid, signal.SIGKILL)
        await until(lambda: pool._places[0].state is None)
        assert not pool.failure and len(pool.servers()) == 1
        pool._places[1].handle.kill()
        await until(lambda: bool(pool.failure))
        assert "no judge is left (`reward.judge.engine`)" in pool.failure and "no such model" in pool.failure

    run(pool, use)


def test_a_judge_that_does_not_start_is_an_error_that_names_the_key(pool: JudgePool, program: Path) -> None:
    (program / "broken").touch()

    async def use() -> None: ...

    with pytest.raises(RemoteError, match="no such model"):
        run(pool, use)
