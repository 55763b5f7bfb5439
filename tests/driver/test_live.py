"""One line in place on a terminal: what is printed meanwhile stays whole, and nothing is left of the line itself."""

import io
import re
import sys

import pytest

from dapo.driver.progress import live_line, terminal_console
from dapo.ground import console

CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]")
WIDTH = 60
LONG = "x" * 100 + " [red]is no markup[/red] [/nor is this] :smile: " + "y" * 30
LIVE = "in step 3/80 · generating for 42s · " + "and much more than fits · " * 4


class Screen:
    """What a terminal of `width` columns shows; fails at a control that it does not know."""

    def __init__(self, width: int) -> None:
        self.width, self.row, self.column = width, 0, 0
        self.rows: list[str] = [""]

    def write(self, text: str) -> list[str]:
        """The rows after this text, without the empty ones at the end."""
        for found in CONTROL.finditer(text):
            if found[0] == "\r":
                self.column = 0
            elif found[0] == "\n":
                self._down()
            elif found[2] == "A":
                self.row = max(0, self.row - int(found[1] or 1))
            elif found[1] == "2" and found[2] == "K":
                self.rows[self.row] = ""
            elif found[2] is None:
                if self.column == self.width:
                    self._down()
                row = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = row[: self.column] + found[0] + row[self.column + 1 :]
                self.column += 1
            else:
                assert found[2] == "m", found
        assert sum(len(found[0]) for found in CONTROL.finditer(text)) == len(text), repr(text)
        return "\n".join(row.rstrip() for row in self.rows).rstrip("\n").split("\n")

    def _down(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.rows):
            self.rows.append("")


def test_what_is_printed_stays_whole_and_the_line_goes() -> None:
    file, before = io.StringIO(), (sys.stdout, sys.stderr)
    screen = Screen(WIDTH)

    def seen() -> list[str]:
        text = file.getvalue()
        file.seek(0)
        file.truncate()
        return screen.write(text)

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
        print("\x1b[36m(RolloutWorker pid=7)\x1b[0m coloured")
        show("last")
    wrapped = [LONG[at : at + WIDTH].rstrip() for at in range(0, len(LONG), WIDTH)]
    rest = ["half a line [/red]", "(RolloutWorker pid=7) coloured"]
    assert seen() == ["step 2/80 · acc 0.41", *wrapped, *rest]
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
