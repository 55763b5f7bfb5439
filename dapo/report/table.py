"""Formats Markdown tables."""

from collections.abc import Sequence


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def head(names: Sequence[str]) -> str:
    return row(names) + "\n|" + "---|" * len(names)


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([head(names), *map(row, rows)])
