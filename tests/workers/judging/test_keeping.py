"""How a server is kept up, with a program in place of vLLM's that starts in no time and fails as it is told to."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from workers.judging.server import Server


def run(use: Callable[[Server], Awaitable[None]], **options: Any) -> None:
    """Starts a server, keeps it up and uses it."""

    async def whole() -> None:
        server = Server([], "127.0.0.1", **{"silence_s": 60.0, "max_restarts": 3} | options)
        try:
            await server.start(60)
            keeping = asyncio.create_task(server.keep(60))
            async with asyncio.timeout(120):
                await use(server)
            keeping.cancel()
        finally:
            server.kill()

    asyncio.run(whole())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.02)


def engine(folder: Path) -> int:
    return int((folder / "engine").read_text())


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until_gone(pid: int) -> None:
    """Waits for the kernel: a signal to a group of processes ends each in its own time."""
    async with asyncio.timeout(60):
        await until(lambda: gone(pid))


pytestmark = pytest.mark.usefixtures("program")


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_ends_is_started_again_at_its_address_without_its_old_engine(ended_by: int, program: Path) -> None:
    async def use(server: Server) -> None:
        url, pid, old = server.url, server.pid, engine(program)
        os.kill(pid, ended_by)
        await until(lambda: server.restarts == 1 and server.up)
        assert server.url == url and server.pid != pid and not server.failure
        await until_gone(old)
        assert not gone(engine(program))

    run(use)
    assert {path.read_text() for path in program.glob("start*")} == {(program / "start0").read_text()}  # one key
    asyncio.run(until_gone(engine(program)))  # killed with the rest


def test_one_that_the_system_refuses_to_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, no process left: it must not stay down unnoticed."""
    start, refused = Server.start, iter([OSError(28, "No space left on device")])

    async def starts(server: Server, timeout_s: float) -> None:
        if server.restarts and (error := next(refused, None)):
            raise error
        await start(server, timeout_s)

    monkeypatch.setattr(Server, "start", starts)

    async def use(server: Server) -> None:
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: server.restarts == 2 and server.up)
        assert not server.failure

    run(use)


def test_one_that_stands_still_is_started_again(program: Path) -> None:
    async def use(server: Server) -> None:
        os.kill(server.pid, signal.SIGSTOP)
        await until(lambda: server.restarts == 1 and server.up)

    run(use, silence_s=2.0)


def test_one_whose_engine_fails_is_started_again(program: Path) -> None:
    async def use(server: Server) -> None:
        (program / "status").write_text("500")
        await until(lambda: server.restarts == 1)
        assert not server.up  # it waits for an answer that is one
        (program / "status").unlink()
        await until(lambda: server.up)

    run(use)


def test_one_that_ends_again_and_again_is_given_up_with_the_reason(program: Path) -> None:
    async def use(server: Server) -> None:
        (program / "broken").touch()
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: bool(server.failure))
        assert server.restarts == 2 and not server.up
        assert "2 times" in server.failure and "exit status 1): ValueError: no such model" in server.failure

    run(use, max_restarts=2)


def test_one_that_does_not_start_is_an_error_with_the_reason(program: Path) -> None:
    async def start(timeout_s: float) -> None:
        await Server([], "127.0.0.1", silence_s=60.0, max_restarts=0).start(timeout_s)

    (program / "status").write_text("400")
    with pytest.raises(RuntimeError, match="refuses a plain conversation .status 400."):
        asyncio.run(start(60))
    (program / "status").write_text("503")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="did not answer within 1 s"):
        asyncio.run(start(1))
    assert time.monotonic() - began < 60
    asyncio.run(until_gone(engine(program)))
    (program / "broken").touch()
    with pytest.raises(RuntimeError, match="its process ended .exit status 1.: ValueError: no such model"):
        asyncio.run(start(60))


def test_what_it_writes_is_kept_to_its_end_alone_and_never_holds_it_up(program: Path) -> None:
    (program / "chatty").touch()

    async def use(server: Server) -> None:
        assert os.stat(f"/proc/{server.pid}/fd/1").st_size < 1e6  # of 16 MiB
        (program / "broken").touch()
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: bool(server.failure))
        assert server.failure.endswith("ValueError: no such model")

    before = len(os.listdir("/proc/self/fd"))
    run(use, max_restarts=2)
    assert len(os.listdir("/proc/self/fd")) <= before
