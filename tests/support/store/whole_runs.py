"""Whole runs of the loop with a sample store, and what plain sqlite3 reads of it (tests only)."""

import math
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dapo.config.schema import LoggingConfig
from dapo.store.samples import SampleStore
from tests.support.driver.loops import tiny_config


def rows(directory: Path, query: str, *values: object) -> list[tuple]:
    with closing(sqlite3.connect(directory / "samples.sqlite")) as connection:
        return connection.execute(query, values).fetchall()


def one(directory: Path, query: str, *values: object) -> tuple:
    [found] = rows(directory, query, *values)
    return found


def store_in(directory: Path, **options) -> SampleStore:
    directory.mkdir(exist_ok=True)
    return SampleStore(directory, LoggingConfig(**options), warn=pytest.fail)


def kinds(prompt, sample, response) -> float:
    """Prompts of every outcome, and such as change it from visit to visit."""
    if prompt.id % 7 == 0:
        return math.nan
    if prompt.id % 5 == 0:
        return float(int(response.text) % 2)
    return {0: 0.0, 1: 1.0, 2: float(sample % 2)}[prompt.id % 3]


def config(**trainer):
    cfg = tiny_config(**trainer)
    cfg.reward.overlong_filtering.enable = True
    cfg.data.gen_batch_size = 24
    return cfg
