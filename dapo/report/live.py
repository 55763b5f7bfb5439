"""Keeps one status line at the bottom of a terminal, updated in place below everything that is printed. Output through
`sys.stdout` and `sys.stderr`, also of libraries, appears above it. The line is erased at the end. Without a terminal
nothing is shown."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def live_line(console: "Console | None" = None) -> Iterator[Callable[[str], None] | None]:
    """Yields a function that replaces the line, callable from any thread; None without a terminal. console: for tests;
    None: the terminal that standard output and standard error both must be."""
    console = console or _terminal()
    if console is None or not console.is_terminal or console.is_dumb_terminal:
        yield None
        return
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, transient=True, auto_refresh=False) as live:
        # Truncated to the terminal's current width at each refresh: a line that wraps could not be erased.
        yield lambda line: live.update(Text(line, no_wrap=True), refresh=True)


def _terminal() -> "Console | None":
    """Returns the terminal if both streams are one, else None: the order of lines would be lost."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    return terminal_console()


def terminal_console(**options: Any) -> "Console":
    """Returns a rich console that prints lines unchanged: no markup, wrapping or colours; it never hides the cursor, so
    that a killed process leaves the terminal usable."""
    from rich.console import Console

    class _Plain(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False

    return _Plain(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)
