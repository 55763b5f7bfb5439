"""Lays rows out for a terminal: tables, and answers as blocks of text.

In: rows of `dapo.store.reader`. Out: lines on standard output. What a model wrote is text and nothing else: it is
printed as `rich.text.Text`, which takes no markup, and without control characters.
"""

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

from dapo.report.console import plain

Row = Mapping[str, Any]
CELL = 48  # characters of a text in a table
NARROW, WIDE = 110, 200  # columns at least, and where the output is no terminal
HEADINGS = {  # that are wider than what stands below them
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
    """Returns where everything is shown; a narrower terminal breaks the lines itself."""
    width = shutil.get_terminal_size((WIDE, 24)).columns if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE
    return Console(width=max(width, NARROW))


def table(title: str, names: Sequence[str], rows: Sequence[Sequence[object]], numbers: int = 0) -> None:
    """Prints rows under their names, or the title alone. numbers: of columns at the left, aligned to the right."""
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
    """Prints a text as it is, with its line breaks, under a title."""
    out = console()
    out.print(Text(title, style="bold"))
    out.print(Text(plain(text)))
    out.print()


def cell(value: object) -> str:
    """Returns a value for a table: short, in one line; an absent one as a dash."""
    if value is None or isinstance(value, float) and math.isnan(value):
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.0e}" if 0 < abs(value) < 1e-3 else f"{value:.3g}"
    return plain(str(value)).replace("\n", "⏎")


def beginning(text: str | None) -> str:
    """Returns the beginning of a text for a table."""
    return "" if text is None else text[:CELL] + "…" * (len(text) > CELL)


def ending(text: str | None) -> str:
    """Returns the end of a text, where an answer stands."""
    return "(not kept)" if text is None else "…" * (len(text) > CELL) + text[-CELL:]


def around(text: str, what: str) -> str:
    """Returns the place in a text where `what` stands first."""
    at = max(0, text.lower().find(what.lower()))
    start, end = max(0, at - CELL // 2), at + len(what) + CELL // 2
    return "…" * (start > 0) + text[start:end] + "…" * (end < len(text))
