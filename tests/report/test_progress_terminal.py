"""What a person sees of a run on a real terminal, while it goes on and after: a real stream, a clock that is moved."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.report.screen import Screen

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r"in step 7/80 · generating for \d+[sm] · batch in ~\d+[sm] · groups 2/4 usable, 1 to be dropped · "
    r"responses 12 done, \d+ running · \d+ tokens/s · longest \d+[sm]"
)
WARNING = "engine 1 is lost: its process has ended" + ", another one starts in its place" * 5
DONE = b"\0"  # after each order
PROGRAM = """
import os, signal, sys
import pytest
from dapo.report import console
from dapo.report.progress import Progress
from tests.report.test_progress import EVERY_S, Clock, collecting

signal.alarm(120)
clock = Clock(pytest.MonkeyPatch())
with collecting(clock) as (trainer, next_step), console.hearing_warnings(lambda line: None):
    with Progress(80, EVERY_S) as progress:
        progress.of(trainer)
        for order in sys.stdin:
            word, _, text = order.rstrip().partition(" ")
            if word == "look":
                for _ in range(int(text)):
                    clock.now += 1
                    progress.look(clock.now)
            elif word == "next":
                next_step()
            else:
                {"say": console.say, "warn": console.warn}[word](text)
            os.write(1, b"\\0")
"""


@contextmanager
def program(output: int) -> Iterator[Callable[[str], None]]:
    """Runs PROGRAM, whose streams are `output`; what it is told to do."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment) as running:
        os.close(output)
        assert running.stdin is not None

        def tell(order: str) -> None:
            running.stdin.write(f"{order}\n".encode())
            running.stdin.flush()

        yield tell
    assert running.returncode == 0


class Terminal:
    """The end of a pseudo-terminal at which a person sits."""

    def __init__(self) -> None:
        self._leader, self.follower = pty.openpty()
        self.screen = Screen(0)
        self.written = b""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.screen.resize(columns)

    def lines(self) -> list[str]:
        """What is on the screen once the order is carried out, or the program has ended."""
        data = b""
        while not data.endswith(DONE):
            try:
                data += os.read(self._leader, 65536)
            except OSError:  # the other end is closed
                break
        self.written += data
        return self.screen.write(data.rstrip(DONE).decode()).lines

    def close(self) -> None:
        os.close(self._leader)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal()
    yield opened
    opened.close()


def wrapped(text: str, width: int) -> list[str]:
    return [text[at : at + width].rstrip() for at in range(0, len(text), width)]


def test_what_a_person_sees_on_a_terminal_that_changes_its_width(terminal: Terminal) -> None:
    terminal.resize(200)
    with program(terminal.follower) as tell:

        def shown(order: str) -> list[str]:
            tell(order)
            return terminal.lines()

        [whole] = shown("look 5")
        assert LINE.fullmatch(whole) and 80 < len(whole) < 200
        terminal.resize(80)
        [cut] = shown("look 1")
        assert cut == whole.replace("5s", "6s")[:80].rstrip(), "in place, a second later, at the new width"
        above = wrapped(WARNING, 80)
        assert shown(f"warn {WARNING}") == [*above, cut], "all of it, above the line"
        assert shown(f"warn {WARNING}") == [*above, cut], "once"
        *before, later = shown("look 60")
        assert before == above and later.startswith("in step 7/80 · generating for 66s · batch in ~66s"), (
            "no line a minute"
        )
        step = "step 7/80 · " + "groups 2/4 mixed · " * 5
        above += wrapped(step.rstrip(), 80)
        shown(f"say {step}")
        assert shown("next") == [*above, later]
        terminal.resize(200)
        *before, last = shown("look 1")
        assert before == above and last.startswith("in step 8/80 · ") and len(last) > 80
    ended = terminal.lines()
    assert ended == [*above, *wrapped(f"1 more times: {WARNING}", 200)], "the line has gone, and nothing else"
    assert (terminal.screen.row, terminal.screen.column) == (len(ended), 0), "where a shell's prompt will be"
    assert b"\x1b[?25l" not in terminal.written, "the cursor was always there"


def test_a_file_has_a_line_a_minute_and_no_control_characters(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with program(os.open(log, os.O_WRONLY | os.O_CREAT)) as tell:
        for order in ("say ready", "look 185", "say step 7/80", "next", "look 59", "look 2"):
            tell(order)
    parts = log.read_bytes().decode().split(DONE.decode())
    assert parts.pop(0) == "ready\n"
    minutes = [LINE.fullmatch(line) for line in parts[0].splitlines()]
    assert len(minutes) == 3 and all(minutes)
    assert parts[1:4] == ["step 7/80\n", "", ""] and parts[4].startswith("in step 8/80 · ") and parts[5:] == [""]
    assert "\x1b" not in log.read_text()
