"""Signals, in processes of their own; and work that a signal does not cut short."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo.faults.signals import SAME_S, SIGNALS, finish
from dapo.pools import ActorsLost

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60
# Prints where it is; a byte on its input lets the shielded work go on.
RUN = """
import asyncio, signal, sys
from dapo.faults import signals
from dapo.faults.signals import Stop, finish

signals.SAME_S = float(sys.argv[1])

async def work():
    print("working", flush=True)
    await asyncio.to_thread(sys.stdin.read, 1)
    print("worked", flush=True)

async def body():
    stop = Stop(asyncio.current_task())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a library does between the two calls
    stop.install()
    stop.install()
    try:
        await finish(work())
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("cancelled by", stop.first, flush=True)
        await asyncio.to_thread(sys.stdin.read, 1)  # a save
        print("saved", flush=True)

asyncio.run(body())
"""


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A run in the middle of its shielded work. Its parameter: the seconds in which signals are one."""
    pipe, same_s = subprocess.PIPE, getattr(request, "param", SAME_S)
    command = [sys.executable, "-c", RUN, str(same_s)]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as running:
        assert line(running) == "working"
        yield running
        running.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("x")
    process.stdin.flush()


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_lets_the_work_end_and_then_saves(process, number):
    process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    go_on(process)
    assert line(process) == "worked"
    assert line(process) == f"cancelled by {int(number)}"
    go_on(process)
    assert line(process) == "saved" and process.wait(PATIENCE_S) == 0


def test_a_burst_is_one_signal(process):
    """A scheduler signals the launcher, the launcher its children, and the shell the group: one wish, several times."""
    began = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.1)
    if time.monotonic() - began > SAME_S / 2:
        pytest.skip("this machine is too slow to send a burst")
    assert process.poll() is None
    go_on(process)
    assert (line(process), line(process)) == ("worked", "cancelled by 15")
    go_on(process)
    assert line(process) == "saved" and process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("process", [0.1], indirect=True, ids=["soon"])
@pytest.mark.parametrize("working", [True, False], ids=["in the work", "in the save"])
@pytest.mark.parametrize(
    ("second", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)], ids=lambda each: str(each)
)
def test_a_later_signal_ends_the_process_at_once(process, second, code, working):
    process.send_signal(signal.SIGTERM)
    if not working:
        go_on(process)
        assert (line(process), line(process)) == ("worked", "cancelled by 15")
    time.sleep(0.4)
    assert process.poll() is None
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None:  # on a busy machine it may see the first two at one moment
        assert time.monotonic() < deadline, "a later signal ends nothing"
        process.send_signal(second)
        time.sleep(0.4)
    assert process.returncode == code
    assert line(process) == "", "nothing was finished"


def test_finish_ends_its_work_and_raises_what_comes_first():
    async def body(error: Exception | None, cancels: int) -> list[str]:
        done = []

        async def work() -> str:
            await asyncio.sleep(0.01)
            done.append("done")
            if error is not None:
                raise error
            return "result"

        task = asyncio.create_task(finish(work()))
        for _ in range(cancels):
            await asyncio.sleep(0)
            task.cancel()
        try:
            done.append(await task)
        except (asyncio.CancelledError, RuntimeError) as raised:
            done.append(type(raised).__name__)
        return done

    assert asyncio.run(body(None, 0)) == ["done", "result"]
    assert asyncio.run(body(RuntimeError(), 0)) == ["done", "RuntimeError"]
    for cancels in (1, 3):
        assert asyncio.run(body(None, cancels)) == ["done", "CancelledError"]
        assert asyncio.run(body(ActorsLost(), cancels)) == ["done", "CancelledError"]
