"""One line in place on a terminal: what is printed meanwhile stays whole, and nothing is left of the line itself."""

import io
import os
import pty
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import pytest

from dapo.report import console
from dapo.report.live import live_line, terminal_console
from tests.support.report.screen import Screen

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 60
LONG = "x" * 100 + " [red]is no markup[/red] [/nor is this] :smile: " + "y" * 30
LIVE = "in step 3/80 · generating for 42s · " + "and much more than fits · " * 4


def test_what_is_printed_stays_whole_and_the_line_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    file, before = io.StringIO(), (sys.stdout, sys.stderr)
    screen = Screen(WIDTH)

    def seen() -> list[str]:
        text = file.getvalue()
        file.seek(0)
        file.truncate()
        return screen.write(text).lines

    with live_line(terminal_console(file=file, force_terminal=True, width=WIDTH, _environ={})) as show:
        assert show is not None
        show("first")
        assert seen() == ["first"]
        show(LIVE)
        [line] = seen()
        assert line == LIVE[:WIDTH].rstrip(), "in place of the first, cut to the width"
        console.say("step 2/80 · acc 0.41")
        assert seen() == ["step 2/80 · acc 0.41", line]
        console.warn(LONG)
        print("half a line [/red]", end="", file=sys.stderr, flush=True)
        try:
            raise ValueError("[/red]")
        except ValueError:
            traceback.print_exc()
            told = traceback.format_exc()
        print("\x1b[36m(RolloutWorker pid=7)\x1b[0m coloured")
        show("last")
    wrapped = [LONG[at : at + WIDTH] for at in range(0, len(LONG), WIDTH)]
    whole = [row for text in told.splitlines() for row in textwrap.wrap(text, WIDTH, drop_whitespace=False)]
    found = seen()
    assert found[:1] == ["step 2/80 · acc 0.41"] and "".join(found[1 : 1 + len(wrapped)]) == LONG
    rest = found[1 + len(wrapped) :]
    assert rest[0] == "half a line [/red]" and rest[-1] == "(RolloutWorker pid=7) coloured"
    assert "".join(rest[1:-1]).replace(" ", "") == "".join(whole).replace(" ", "")
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("terminal", [{}, {"force_terminal": True, "_environ": {"TERM": "dumb"}}])
def test_without_a_terminal_there_is_no_line(terminal: dict, capsys: pytest.CaptureFixture) -> None:
    file = io.StringIO()
    with live_line(terminal_console(file=file, **terminal)) as show:
        assert show is None
        console.say("a line")
    with live_line() as show:  # these streams are no terminals
        assert show is None
    assert file.getvalue() == "" and capsys.readouterr().out == "a line\n"


PROGRAM = """
import os, signal, sys
signal.alarm(120)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have it ignore
from dapo.report import console
from dapo.report.live import live_line
with live_line() as show:
    if show is None:
        print("no terminal")
    else:
        show("in step 1/2 · generating")
    console.say("step 1/2")
    print("shown", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
"""


@pytest.mark.parametrize("piped", ["", "stdout", "stderr"])
def test_a_real_terminal_and_ctrl_c(piped: str) -> None:
    """Both streams must be terminals: of two that reach one screen by two ways, nobody knows the order."""
    leader, follower = pty.openpty()
    streams = {"stdout": follower, "stderr": follower, **({piped: subprocess.PIPE} if piped else {})}
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm", "FORCE_COLOR": "1"}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, **streams, stdin=subprocess.DEVNULL)
    os.close(follower)
    written = b""
    try:
        while data := os.read(leader, 65536):
            written += data
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(leader)
    output, _ = program.communicate(timeout=60)
    assert program.returncode == -2
    if not piped:
        lines = Screen(80).write(written.decode()).lines
        assert (lines[:2], lines[2][:9], lines[-1]) == (["step 1/2", "shown"], "Traceback", "KeyboardInterrupt")
        assert b"generating" in written and b"\x1b[?25l" not in written, "a killed process leaves its cursor"
    else:
        assert b"generating" not in written and b"\x1b" not in written
        assert (output or b"no terminal").startswith(b"no terminal")
