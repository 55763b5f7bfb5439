"""Prints tables and answers on a terminal. Model output is printed as `rich.text.Text`, which interprets no markup, and
without control characters."""

import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo.ground.console import plain

Row = Mapping[str, Any]
CELL = 48  # characters of a text in a table
NARROW, WIDE = 110, 200  # minimum width, and width without a terminal
HEADINGS = {  # those wider than the values of their column
    "generation": "gener-\nation",
    "all_correct": "all\nright",
    "all_wrong": "all\nwrong",
    "unscorable": "un-\nscorable",
    "overlong": "over-\nlong",
    "accuracy": "accu-\nracy",
    "accuracy_low": "low",
    "accuracy_high": "high",
    "variance": "vari-\nance",
    "truncated": "trun-\ncated",
}


def console() -> Console:
    width = shutil.get_terminal_size((WIDE, 24)).columns if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE
    return Console(width=max(width, NARROW))


def table(title: str, names: Sequence[str], rows: Sequence[Sequence[object]], numbers: int = 0) -> None:
    """Prints rows under a title; the title alone without rows. numbers: columns at the left that are right-aligned."""
    out = console()
    out.print(Text(plain(title), style="bold"))
    if not rows:
        return
    shown = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    for place, name in enumerate(names):
        right = place < numbers
        heading = Text(HEADINGS.get(name, name))
        shown.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row in rows:
        shown.add_row(*[Text(cell(value)) for value in row])
    out.print(shown)


def block(title: str, text: str) -> None:
    out = console()
    out.print(Text(title, style="bold"))
    out.print(Text(plain(text)))
    out.print()


def cell(value: object) -> str:
    if value is None or isinstance(value, float) and math.isnan(value):
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.0e}" if 0 < abs(value) < 1e-3 else f"{value:.3g}"
    return plain(str(value)).replace("\n", "⏎")


def beginning(text: str | None) -> str:
    return "" if text is None else text[:CELL] + "…" * (len(text) > CELL)


def ending(text: str | None) -> str:
    return "(not kept)" if text is None else "…" * (len(text) > CELL) + text[-CELL:]


def around(text: str, what: str) -> str:
    at = max(0, text.lower().find(what.lower()))
    start, end = max(0, at - CELL // 2), at + len(what) + CELL // 2
    return "…" * (start > 0) + text[start:end] + "…" * (end < len(text))
