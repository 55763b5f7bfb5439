"""Steps for the sample store, made without the loop and what it imports, and what plain sqlite3 reads of them (tests
only)."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dapo.algorithm.fate import TRAINED
from dapo.algorithm.outcome import MIXED
from dapo.config.schema import LoggingConfig
from dapo.report.store.samples import SampleStore
from dapo.types import Collected, Group
from tests.support.fakes import make_group


def collected_of(groups: list[Group], fate: str = TRAINED) -> Collected:
    return Collected(
        drawn=tuple(groups),
        groups=tuple(groups),
        fates=(fate,) * len(groups),
        outcomes=(MIXED,) * len(groups),
        returned=(),
        why_returned="",
        unfinished=frozenset(),
    )


def with_text(index: int, text: str) -> Group:
    group = make_group(index, [1.0, 0.0])
    return replace(group, responses=tuple(replace(each, text=text) for each in group.responses))


def store_in(directory: Path, **options) -> SampleStore:
    directory.mkdir(exist_ok=True)
    return SampleStore(directory, LoggingConfig(**options), warn=pytest.fail)


def rows(directory: Path, query: str, *values: object) -> list[tuple]:
    with closing(sqlite3.connect(directory / "samples.sqlite")) as connection:
        return connection.execute(query, values).fetchall()


def one(directory: Path, query: str, *values: object) -> tuple:
    [found] = rows(directory, query, *values)
    return found
