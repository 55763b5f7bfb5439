"""Keeps one line at the bottom of a terminal that changes in place, below everything that is printed.

In: the line, again and again. Out: on a terminal that line, gone without a trace at the end; elsewhere nothing. What
goes through `sys.stdout` and `sys.stderr` meanwhile, tracebacks and lines of libraries included, is printed above it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def live_line(console: "Console | None" = None) -> Iterator[Callable[[str], None] | None]:
    """Yields what shows a line in place of the one before, from any thread; None where there is no terminal.

    console: for tests; None: one on standard output, which must be a terminal, and standard error as well.
    """
    console = console or _terminal()
    if console is None or not console.is_terminal or console.is_dumb_terminal:
        yield None
        return
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, transient=True, auto_refresh=False) as live:
        # Shown at the next refresh, cut to the width that the terminal has then: a line that wraps could not be erased.
        yield lambda line: live.update(Text(line, no_wrap=True), refresh=True)


def _terminal() -> "Console | None":
    """Returns the terminal that both streams are, or None: of a line for one and a file for the other, only the person
    who reads both would see the order."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    return terminal_console()


def terminal_console(**options: Any) -> "Console":
    """Returns rich's console such that lines come out as they were printed: no markup, no wrapping, no colours of its
    own; and such that a process which is killed leaves no terminal without a cursor."""
    from rich.console import Console

    class _Plain(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False

    return _Plain(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)
