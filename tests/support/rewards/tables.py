"""Tables of hostile or unprintable texts, one row a line: ⟪U+000A⟫ stands for a character, ⟪3×ab⟫ for ababab."""

import re
from pathlib import Path

MARK = re.compile("⟪([^⟪⟫]*)⟫")


def rows(file: Path) -> list[list[str]]:
    """The rows below the head line, with their marks as written."""
    return [line.split("\t") for line in file.read_text().split("\n")[1:] if line]


def meant(cell: str) -> str:
    """The text that a cell stands for; marks may hold others."""
    while "⟪" in cell:
        cell = MARK.sub(lambda mark: _one(mark[1]), cell)
    return cell


def _one(mark: str) -> str:
    count, times, unit = mark.partition("×")
    return int(count) * unit if times else chr(int(mark.removeprefix("U+"), 16))
