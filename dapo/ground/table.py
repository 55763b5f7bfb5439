"""Formats Markdown tables and numbers."""

from collections.abc import Sequence


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def head(names: Sequence[str]) -> str:
    return row(names) + "\n|" + "---|" * len(names)


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([head(names), *map(row, rows)])


def short(number: float) -> str:
    """Formats a count: 850, 3.1k, 12.0M."""
    if number < 999.5:
        return f"{number:.0f}"
    return f"{number / 1000:.1f}k" if number < 999_950 else f"{number / 1e6:.1f}M"


def duration(seconds: float) -> str:
    """Formats seconds: 45s, 12m, 3h05m, 2d04h."""
    if seconds < 90:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    if hours == 0:
        return f"{minutes}m"
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"
