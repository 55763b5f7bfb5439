"""Prints tables and answers on a terminal. Model output is printed as `rich.text.Text`, which interprets no markup, and
without control characters."""

import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dapo.ground.console import plain

Row = Mapping[str, Any]
CELL = 48  # letters of a text in a table, where the terminal has room
LEAST = 24  # letters that the last column has before others are left out
GAP = 2  # between columns
UNKNOWN, NARROWEST = 200, 40  # width without a terminal; of a table at least
SPARE = (  # columns that a narrow terminal does without, the first to go first
    *(
        "variance",
        "version",
        "sync",
        "evaluation",
        "overlong",
        "unscorable",
        "sample",
        "update",
        "generation",
        "truncated",
        "share",
    ),
    *("last_step", "length", "reward", "start", "drawn", "longest", "tokens", "draw"),
)
HEADINGS = {  # those wider than the values of their column
    "generation": "gener-\nation",
    "evaluation": "evalu-\nation",
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


def console(width: int = 0) -> Console:
    """width: 0: the terminal's."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = width or (shutil.get_terminal_size((UNKNOWN, 24)).columns if known else UNKNOWN)
    return Console(width=max(width, NARROWEST))


def table(
    title: str,
    names: Sequence[str],
    rows: Sequence[Sequence[object]],
    numbers: int = 0,
    *,
    wide: bool = False,
    cut: Callable[[str, int], str] | None = None,
) -> None:
    """Prints rows under a title; the title alone without rows. numbers: columns at the left that are right-aligned.
    wide: all columns, however wide the terminal is. cut: shortens the last column to a number of letters; None: it
    wraps."""
    out = console(10_000 if wide else 0)
    out.print(Text(plain(title), style="bold"))
    if not rows:
        return
    cells = [[cell(value) for value in row] for row in rows]
    headings = [HEADINGS.get(name, name) for name in names]
    widths = [max(map(cell_len, [*headings[at].split("\n"), *(row[at] for row in cells)])) for at in range(len(names))]
    last = len(names) - 1
    text = numbers <= last  # the last column takes what the others leave
    if cut:
        widths[last] = min(widths[last], CELL)

    def room(shown: Sequence[int]) -> int:
        return out.width - sum(widths[at] + GAP for at in shown if at != last)

    shown, least = list(range(len(names))), min(widths[last], LEAST) if text else widths[last]
    for name in (*SPARE, *reversed(names[2:-1])):
        if room(shown) >= least:
            break
        shown = [at for at in shown if names[at] != name or at == last]
    made = Table(box=SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False, collapse_padding=True)
    for at in shown:
        width = min(widths[at], room(shown)) if at == last else widths[at]
        fixed = at != last or cut is not None
        kind: Literal["left", "right"] = "right" if at < numbers else "left"
        made.add_column(Text(headings[at]), justify=kind, width=width, no_wrap=fixed, overflow="fold")
    for row in cells:
        if cut:
            row[last] = cut(row[last], min(widths[last], room(shown)))
        made.add_row(*[Text(row[at]) for at in shown])
    out.print(made)
    if left := [name for at, name in enumerate(names) if at not in shown]:
        out.print(Text(f"not shown for lack of width: {', '.join(left)} (--wide)", style="dim"))


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


def beginning(text: str, letters: int = CELL) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def ending(text: str, letters: int = CELL) -> str:
    return text if len(text) <= letters else f"…{text[1 - letters :]}"


def around(text: str, what: str, letters: int = CELL) -> str:
    at = max(0, text.lower().find(what.lower()))
    start = max(0, min(at - (letters - len(what)) // 2, len(text) - letters))
    return beginning(f"…{text[start + 1 :]}" if start else text, letters)
