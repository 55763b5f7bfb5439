"""Writes Markdown tables: names and cells in, lines out. All tools write theirs with it."""

from collections.abc import Sequence


def row(cells: Sequence[str]) -> str:
    """Returns one line of a table."""
    return "| " + " | ".join(cells) + " |"


def head(names: Sequence[str]) -> str:
    """Returns the two lines that begin a table, for rows that follow one by one."""
    return row(names) + "\n|" + "---|" * len(names)


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a whole table."""
    return "\n".join([head(names), *map(row, rows)])
