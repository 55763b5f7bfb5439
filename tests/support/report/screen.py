"""What a person sees of what a program wrote to a terminal, by the few controls that a line in place needs."""

import re

CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]")


class Screen:
    """Rows of `width` cells; long lines go on in the next row, as a terminal shows them. Fails at a control that it
    does not know."""

    def __init__(self, width: int) -> None:
        self.width, self.row, self.column = width, 0, 0
        self.rows: list[list[str]] = [[]]

    def write(self, text: str) -> "Screen":
        at = 0
        while at < len(text):
            found = CONTROL.match(text, at)
            assert found, repr(text[at : at + 20])
            at = found.end()
            self._take(found)
        return self

    def resize(self, width: int) -> None:
        """What does not fit any more is gone, as xterm has it."""
        self.width, self.column = width, min(self.column, width)
        for cells in self.rows:
            del cells[width:]

    def _take(self, found: re.Match[str]) -> None:
        match found[0], found[1], found[2]:
            case "\r", _, _:
                self.column = 0
            case "\n", _, _:
                self._down()
                self.column = 0  # the terminal's driver writes a return with it
            case _, "2", "K":
                self.rows[self.row] = []
            case _, count, "A":
                self.row = max(0, self.row - int(count or 1))
            case _, _, "m":
                pass
            case character, None, None:
                self._put(character)
            case other:
                raise AssertionError(other)

    def _put(self, character: str) -> None:
        if self.column == self.width:
            self._down()
            self.column = 0
        cells = self.rows[self.row]
        cells += [" "] * (self.column + 1 - len(cells))
        cells[self.column] = character
        self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])

    @property
    def lines(self) -> list[str]:
        """The rows, less the empty ones at the end."""
        found = ["".join(cells).rstrip() for cells in self.rows]
        while found and not found[-1]:
            found.pop()
        return found
