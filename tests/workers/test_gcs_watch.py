"""A block ends when nothing answers at an address any more, whatever it was doing; a real server is what answers."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dapo.ground.watchdog import Watchdog
from dapo.workers import gcs_watch as head
from dapo.workers.gcs_watch import HeadLost, while_reachable

GRACE_S = 0.15


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "EVERY_S", 0.025)


async def beside_a_server(body: Callable[[asyncio.Server, str], object]) -> object:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        return await asyncio.wait_for(body(server, f"127.0.0.1:{port}"), 30)
    finally:
        server.close()


def test_a_block_is_cut_short_saves_and_tells_why():
    saved = []

    async def body(server: asyncio.Server, address: str) -> None:
        with pytest.raises(HeadLost, match=f"at {address} has not answered for 0.15 s.*the same command continues"):
            async with while_reachable(address, GRACE_S):
                server.close()
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0.05)
                    saved.append(True)

    asyncio.run(beside_a_server(body))
    assert saved == [True]
    for thread in threading.enumerate():
        if thread.name == "head":
            thread.join(10)
            assert not thread.is_alive(), "it would end the process later"


def test_a_block_that_cannot_save_does_not_keep_the_process(monkeypatch):
    monkeypatch.setattr(head, "LAST_S", GRACE_S + 0.2)
    ended, told = threading.Event(), []

    def end(message: str) -> None:
        told.append(message)
        ended.set()

    async def body(server: asyncio.Server, address: str) -> None:
        with pytest.raises(HeadLost):
            async with while_reachable(address, GRACE_S, end=end):
                server.close()
                try:
                    await asyncio.Event().wait()
                finally:
                    assert ended.wait(20)

    asyncio.run(beside_a_server(body))
    assert len(told) == 1 and "has not answered for 0.15 s" in told[0] and told[0].endswith("there was no saving it")


def test_a_block_whose_head_is_there_ends_as_it_does():
    async def body(server: asyncio.Server, address: str) -> str:
        async with while_reachable(address, GRACE_S):
            await asyncio.sleep(3 * GRACE_S)
        with pytest.raises(ValueError, match="its own"):
            async with while_reachable(address, GRACE_S):
                raise ValueError("its own")
        assert len(asyncio.all_tasks()) <= 2  # this one and the one that waits for it
        return "ended"

    assert asyncio.run(beside_a_server(body)) == "ended"


@pytest.mark.parametrize(("silences", "lost"), [(3, False), (4, True)])
def test_a_head_that_takes_connections_and_answers_nothing_is_named_and_given_up_later(monkeypatch, silences, lost):
    """The kernel takes connections for a process that is stopped."""
    monkeypatch.setattr(head, "STILL_S", 4 * head.ASK_S)
    answers, named = iter([False] * 3 + [True] + [False] * silences), []
    answered = threading.Event()

    def scripted() -> bool:
        answer = next(answers, None)
        if answer is None:
            answered.set()
        return answer is not False

    async def body(server: asyncio.Server, address: str) -> bool:
        try:
            async with while_reachable(address, GRACE_S, scripted):
                while not answered.is_set():
                    named.extend(told())
                    await asyncio.sleep(0.005)
                assert not told(), "it answers again"
        except HeadLost as error:
            assert f"at {address} has not answered for 40 s" in str(error)
            return True
        return False

    assert asyncio.run(beside_a_server(body)) == lost
    assert named


@pytest.mark.parametrize(
    ("how", "messages"), [("dies", 1), ("dies with the head", 0), ("is left", 0), ("stands still", 1)]
)
def test_a_raylet_that_dies_or_is_given_up_ends_the_process_with_a_message(monkeypatch, tmp_path, how, messages):
    """Ray would end the process by its C++ code, with a dump of its state."""
    place, over, ended = tmp_path / "raylet", threading.Event(), []
    script = (
        f"import socket, time; s = socket.socket(socket.AF_UNIX); s.bind({str(place)!r}); s.listen(); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as raylet:
        while not place.exists() or not listens(place):
            time.sleep(0.01)
        monkeypatch.setattr(head, "takes_connections", lambda address: how != "dies with the head")
        before = set(threading.enumerate())  # with that of the Ray of this process
        head.end_with_raylet(
            *(str(place), "head:1", over, lambda: how == "stands still"),
            lambda message, code: ended.append((message, code)),
        )
        [thread] = [each for each in threading.enumerate() if each.name == "raylet" and each not in before]
        if how == "is left":
            over.set()
        if how == "stands still":
            thread.join(20)
        raylet.kill()
        thread.join(20)
        assert not thread.is_alive()
    assert len(ended) == messages
    for message, code in ended:
        assert "the same command continues" in message and code == 85
        assert (how in message) == (how == "stands still")


def told() -> list[str]:
    return [line for line in Watchdog(60.0).due(time.monotonic() + 100) if "stands still" in line]


def listens(place: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(str(place))
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(("misses", "lost"), [(5, False), (6, True)])
def test_only_misses_in_a_row_count(monkeypatch, misses, lost):
    """GRACE_S is six of them. A process that stood still itself, for as long, missed one."""
    answers = iter([*[False] * 5, True, *[False] * misses, *[True] * 3])
    done = threading.Event()

    def scripted(address: str) -> bool:
        answer = next(answers, None)
        if answer is None:
            done.set()
        return answer is not False

    async def body() -> bool:
        try:
            async with while_reachable("host:1", GRACE_S):
                while not done.is_set():
                    await asyncio.sleep(0.01)
        except HeadLost:
            return True
        return False

    monkeypatch.setattr(head, "takes_connections", scripted)
    assert asyncio.run(body()) == lost
