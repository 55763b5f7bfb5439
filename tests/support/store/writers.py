"""A writer of the sample store, what it tells, and what it left (tests only)."""

import sqlite3
from contextlib import closing
from pathlib import Path

from dapo.store.writer import Writer

PATIENCE_S = 60.0  # nothing here takes a second


class Told(list[str]):
    """Warnings."""

    __call__ = list.append


def writer_of(directory: Path, told: Told, guard=lambda: None) -> Writer:
    writer = Writer(directory / "samples.sqlite", warn=told, guard=guard)
    writer.on_missing = lambda message: lambda connection: event(connection, message)
    return writer


def event(connection: sqlite3.Connection, message: str) -> None:
    connection.execute("INSERT INTO events VALUES (NULL, 1, 0, 0, 'missing', ?)", (message,))


def metric(step: int, name: str = "a", value: float = 1.0):
    return lambda connection: connection.execute("INSERT INTO metrics VALUES (?, ?, ?)", (step, name, value))


def read(directory: Path, query: str) -> list[tuple]:
    with closing(sqlite3.connect(directory / "samples.sqlite")) as connection:
        return connection.execute(query).fetchall()


def steps_in(directory: Path) -> list[int]:
    return [step for (step,) in read(directory, "SELECT step FROM metrics ORDER BY step")]
