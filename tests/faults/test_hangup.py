"""A terminal that closes, or a connection that breaks, saves the run; nohup keeps it going."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from dapo.report.console import EXIT_RESUMABLE

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60
RUN = """
import asyncio, os, sys, time
from pathlib import Path
import dapo.main_ppo
from dapo.faults.signals import Stop
from dapo.report.console import say, warn
from dapo.report.progress import Progress

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
            for number in range(3):
                say(f"line {number}")
                warn(f"warning {number}")
                await asyncio.sleep(0.05)
            (folder / "saved").touch()
            raise

dapo.main_ppo.launch = launch
sys.argv[1:] = ["+experiment=dapo_tiny"]
dapo.main_ppo.main()
"""


def environment(folder: Path, moment: str) -> dict[str, str]:
    own = {"FOLDER": str(folder), "MOMENT": moment, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    return {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **own}


def started(streams: int, *, prepare: Any, **how: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", RUN]
    return subprocess.Popen(command, stdin=streams, stdout=streams, stderr=streams, preexec_fn=prepare, **how)


def until_ready(process: subprocess.Popen[bytes], folder: Path) -> None:
    while not (folder / "ready").exists():
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)


@pytest.mark.parametrize("moment", ["training", "starting"])
def test_a_terminal_that_closes_ends_a_run_as_sigterm_does(moment: str, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    owns = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
    with started(follower, prepare=owns, start_new_session=True, env=environment(tmp_path, moment)) as process:
        os.close(follower)
        until_ready(process, tmp_path)
        os.close(leader)
        assert process.wait(PATIENCE_S) == EXIT_RESUMABLE
    assert (tmp_path / "saved").exists() == (moment == "training")


@pytest.mark.parametrize("moment", ["training", "starting"])
def test_under_nohup_a_run_goes_on(moment: str, tmp_path: Path) -> None:
    ignored = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    with started(subprocess.DEVNULL, prepare=ignored, env=environment(tmp_path, moment)) as process:
        until_ready(process, tmp_path)
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == EXIT_RESUMABLE
