"""Signals and terminals that close, in processes of their own; and work that a signal does not cut short."""

import asyncio
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo.ground.console import EXIT_INTERRUPTED, EXIT_RESUMABLE
from dapo.ground.signals import SAME_S, SIGNALS, finish
from dapo.pools import ActorsLost

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60
# Prints where it is; a byte on its input lets the shielded work go on.
WORK = """
import asyncio, signal, sys
from dapo.ground import signals
from dapo.ground.signals import Stop, finish

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
    command = [sys.executable, "-c", WORK, str(same_s)]
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


@pytest.mark.parametrize("burst", [(number,) for number in SIGNALS] + [(15, 15, 2, 15)], ids=str)
def test_the_first_signal_lets_the_work_end_and_then_saves(process, burst):
    """A scheduler signals the launcher, the launcher its children, and the shell the group: one wish, several times."""
    began = time.monotonic()
    for number in burst:
        process.send_signal(number)
        time.sleep(0.1)
    if time.monotonic() - began > SAME_S / 2:
        pytest.skip("this machine is too slow to send a burst")
    assert process.poll() is None
    go_on(process)
    assert (line(process), line(process)) == ("worked", f"cancelled by {int(burst[0])}")
    go_on(process)
    assert line(process) == "saved" and process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("process", [0.1], indirect=True, ids=["soon"])
@pytest.mark.parametrize(
    ("working", "second", "code"),
    [(True, signal.SIGTERM, 143), (False, signal.SIGUSR1, 143), (False, signal.SIGINT, 130)],
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


@pytest.mark.parametrize("cancels", [0, 1, 3])
@pytest.mark.parametrize("error", [None, RuntimeError(), ActorsLost()])
def test_finish_ends_its_work_and_raises_what_comes_first(error, cancels):
    done = []

    async def work() -> str:
        await asyncio.sleep(0.01)
        done.append("done")
        if error is not None:
            raise error
        return "result"

    async def body() -> None:
        task = asyncio.create_task(finish(work()))
        for _ in range(cancels):
            await asyncio.sleep(0)
            task.cancel()
        try:
            done.append(await task)
        except (asyncio.CancelledError, RuntimeError) as raised:
            done.append(type(raised))

    asyncio.run(body())
    first = asyncio.CancelledError if cancels else "result" if error is None else type(error)
    assert done == ["done", first]


PROGRAM = """
import asyncio, os, sys, time
from pathlib import Path
import dapo.main_ppo
from dapo.ground.signals import Stop
from dapo.ground.console import say, warn
from dapo.driver.progress import Progress

folder, moment = Path(os.environ["FOLDER"]), os.environ["MOMENT"]

def launch(cfg):
    if moment == "training":
        asyncio.run(body())
    (folder / "ready").touch()
    time.sleep(100)

async def body():
    Stop(asyncio.current_task()).install()
    with Progress(1, 60.0):
        try:
            say("ready")
            (folder / "ready").touch()
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            say("a line")
            warn("a warning")
            await asyncio.sleep(0.1)
            (folder / "saved").touch()
            raise

dapo.main_ppo.launch = launch
sys.argv[1:] = ["+experiment=dapo_tiny"]
dapo.main_ppo.main()
"""


def started(folder: Path, moment: str, streams: int, **how: Any) -> subprocess.Popen[bytes]:
    own = {"FOLDER": str(folder), "MOMENT": moment, "PYTHONPATH": str(ROOT), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    command, env = [sys.executable, "-c", PROGRAM], {"PATH": os.environ["PATH"], **own}
    process = subprocess.Popen(command, stdin=streams, stdout=streams, stderr=streams, env=env, **how)
    while not (folder / "ready").exists():
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
    return process


@pytest.mark.parametrize("moment", ["training", "starting"])
def test_a_terminal_that_closes_ends_a_run_as_sigterm_does(moment, tmp_path):
    leader, follower = pty.openpty()
    owns = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
    with started(tmp_path, moment, follower, preexec_fn=owns, start_new_session=True) as process:
        os.close(follower)
        os.close(leader)
        assert process.wait(PATIENCE_S) == EXIT_RESUMABLE
    assert (tmp_path / "saved").exists() == (moment == "training")


@pytest.mark.parametrize("moment", ["training", "starting"])
def test_under_nohup_a_run_goes_on(moment, tmp_path):
    ignored = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    with started(tmp_path, moment, subprocess.DEVNULL, preexec_fn=ignored) as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == EXIT_RESUMABLE


STOPPED_WHILE_LOADING = """
import os, runpy, signal, sys
sys.argv = ["-m"]
import dapo

class Loads:
    def find_spec(self, name, *_):
        if name == "omegaconf":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Loads())
runpy.run_module("dapo.main_ppo", run_name="__main__")
"""


def test_ctrl_c_while_modules_are_loaded_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED_WHILE_LOADING], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (EXIT_INTERRUPTED, "dapo: interrupted\n", "")


def test_a_python_without_the_packages_says_how_to_get_them(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-m", "dapo.main_ppo"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert f"{sys.executable} has not the packages of dapo; activate their environment (`source .venv" in done.stderr
