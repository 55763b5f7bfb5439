"""Transactions that fail, and files that are damaged or of another version: nothing ends a run."""

import sqlite3
from contextlib import closing

import pytest

from dapo.store.schema import GROWS, VERSION
from dapo.store.writer import opened
from tests.support.store.writers import PATIENCE_S, metric, steps_in, writer_of


def test_a_transaction_is_whole_or_not_at_all(tmp_path, told):
    writer = writer_of(tmp_path, told)

    def half(connection: sqlite3.Connection) -> None:
        metric(1)(connection)
        raise ValueError("a row that is none")

    writer.put(half)
    writer.put(metric(2))
    writer.close(PATIENCE_S)
    assert steps_in(tmp_path) == [2] and "a row that is none" in told[0]


def test_a_transaction_that_failed_gives_its_room_on_the_disk_back(tmp_path, told):
    writer = writer_of(tmp_path, told)

    def too_much(connection: sqlite3.Connection) -> None:
        for step in range(40):
            metric(step, f"{step}" + "x" * 2**20)(connection)
        assert (tmp_path / "samples.sqlite-wal").stat().st_size > 2**24, "the log shows nothing"
        raise sqlite3.OperationalError("database or disk is full")

    writer.put(too_much)
    assert writer.flush(PATIENCE_S)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2**20
    writer.put(metric(50))
    writer.close(PATIENCE_S)
    assert steps_in(tmp_path) == [50] and len(told) == 1


@pytest.mark.parametrize("content", [b"no database, whatever its name is" * 40, b""])
def test_a_damaged_file_is_set_aside_and_costs_nothing_more(content, tmp_path, told):
    (tmp_path / "samples.sqlite").write_bytes(content)
    writer = writer_of(tmp_path, told)
    writer.put(metric(1))
    writer.close(PATIENCE_S)
    assert steps_in(tmp_path) == [1]
    if content:
        assert (tmp_path / "samples.damaged.sqlite").read_bytes() == content
        assert len(told) == 1 and "is damaged" in told[0]
    else:
        assert not told


def test_damage_that_shows_while_it_runs_is_set_aside_too(tmp_path, told):
    writer = writer_of(tmp_path, told)
    for step in range(400):
        writer.put(metric(step, "x" * 200))
    assert writer.flush(PATIENCE_S)
    writer.close(PATIENCE_S)
    data = bytearray((tmp_path / "samples.sqlite").read_bytes())
    data[8192:] = b"\xff" * (len(data) - 8192)
    (tmp_path / "samples.sqlite").write_bytes(data)
    second = writer_of(tmp_path, told)
    second.put(metric(1000))
    second.close(PATIENCE_S)
    assert steps_in(tmp_path) == [1000] and (tmp_path / "samples.damaged.sqlite").exists()
    assert len(told) == 1 and "is damaged" in told[0]


def test_a_database_of_another_version_is_set_aside(tmp_path, told):
    opened(tmp_path / "samples.sqlite", told).close()
    with closing(sqlite3.connect(tmp_path / "samples.sqlite", isolation_level=None)) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    writer = writer_of(tmp_path, told)
    writer.put(metric(1))
    writer.close(PATIENCE_S)
    assert steps_in(tmp_path) == [1]
    assert told == [
        f"{tmp_path}/samples.sqlite is of version {VERSION + 1}, not {VERSION}; it is now "
        f"{tmp_path}/samples.version_{VERSION + 1}.sqlite"
    ]


def test_a_database_that_lacks_new_tables_gets_them_and_keeps_what_it_has(tmp_path, told):
    with closing(opened(tmp_path / "samples.sqlite", told)) as connection:
        metric(1)(connection)
        connection.execute("DROP TABLE spans")
        connection.execute(f"PRAGMA user_version = {GROWS[-1]}")
    writer = writer_of(tmp_path, told)
    writer.put(lambda connection: connection.execute("INSERT INTO spans VALUES (2, 'update', 0, 1, 1)"))
    writer.put(metric(2))
    writer.close(PATIENCE_S)
    assert steps_in(tmp_path) == [1, 2] and told == []
    with closing(sqlite3.connect(tmp_path / "samples.sqlite")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
        assert connection.execute("SELECT count(*) FROM spans").fetchone() == (1,)
