"""Calls of Ray's that do not come back: their deadline, signals meanwhile, and the end of the process."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dapo.workers import within as within_module
from dapo.workers.within import Late, within

HANG = threading.Event()


@pytest.fixture(autouse=True)
def _not_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(within_module, "left_behind", threading.Event())
    monkeypatch.setattr(within_module, "vanish_at_exit", lambda: None)


def test_a_call_has_a_deadline_and_its_own_error() -> None:
    with pytest.raises(KeyError, match="its own"):
        within(30, lambda: {}["its own"], "Ray")
    assert not within_module.left_behind.is_set()
    with pytest.raises(Late, match=r"Ray has taken more than 0.1 s"):
        within(0.1, HANG.wait, "Ray")
    assert within_module.left_behind.is_set()


def test_what_the_call_has_started_lives_until_its_end() -> None:
    """The kernel ends it with the thread that has started it, as Ray asks."""
    started: list[subprocess.Popen[bytes]] = []
    dies_with_parent = ctypes.CDLL(None).prctl

    def start() -> None:
        started.append(subprocess.Popen(["sleep", "300"], preexec_fn=lambda: dies_with_parent(1, signal.SIGKILL)))

    until = threading.Event()
    within(30, start, "Ray", until=until)
    with pytest.raises(subprocess.TimeoutExpired):
        started[0].wait(0.5)
    until.set()
    assert started[0].wait(30) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, asyncio.CancelledError)]
)
def test_a_signal_ends_the_wait_though_the_event_loop_is_held_up(number: int, error: type[BaseException]) -> None:
    heard = []

    async def body() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(number, heard.append, number)
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        try:
            with pytest.raises(error):
                within(30, HANG.wait, "Ray")
            await asyncio.sleep(0.05)
        finally:
            loop.remove_signal_handler(number)

    asyncio.run(body())
    assert heard == [number], "the loop hears of it too"


@pytest.mark.parametrize(
    ("last", "code"), [("", 0), ("end('why', 85)", 85), ("raise KeyError", 1), ("raise SystemExit(0)", 0)]
)
def test_the_process_ends_with_its_code_and_what_it_printed_though_a_library_would_wait(last: str, code: int) -> None:
    script = (
        "import atexit, subprocess, threading\n"
        "from dapo.ground.console import end\nfrom dapo.workers.within import Late, within\n"
        "atexit.register(threading.Event().wait)\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        "try: within(0.1, threading.Event().wait, 'Ray')\nexcept Late: pass\n"
        f"print('the summary', child.pid)\n{last}"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout[:11]) == (code, "the summary"), found
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(int(found.stdout.split()[-1]), 0)
            time.sleep(0.1)
