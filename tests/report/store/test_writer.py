"""The thread that writes: whole transactions whenever it is killed, what waits is bounded, and neither a disk nor a
damaged file ends a run."""

import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from dapo.report.store import writer as writer_module
from dapo.report.store.schema import GROWS, VERSION
from dapo.report.store.writer import Writer, opened
from dapo.state.lease import LeaseLost
from tests.support.store.stored import one, rows

PATIENCE_S = 60.0  # nothing here takes a second
NAME = "samples.sqlite"


class Told(list[str]):
    """Warnings."""

    __call__ = list.append


@pytest.fixture
def told() -> Told:
    return Told()


def writer_of(directory, told: Told, guard=lambda: None) -> Writer:
    return Writer(directory / NAME, warn=told, guard=guard)


def metric(step: int, name: str = "a"):
    return lambda connection: connection.execute("INSERT INTO metrics VALUES (?, ?, 1.0)", (step, name))


def written(writer: Writer, *steps: int) -> None:
    for step in steps:
        writer.put(metric(step))
    writer.close(PATIENCE_S)


def steps_in(directory) -> list[int]:
    return [step for (step,) in rows(directory, "SELECT step FROM metrics ORDER BY step")]


# Steps of 40 groups of 4 responses of 2 kB, as fast as the thread takes them.
BUSY = """
import sys
from pathlib import Path
from tests.support.store.stored import collected_of, store_in, with_text

store = store_in(Path(sys.argv[1]))
store.begin({})
store.resume(0)
for step in range(1, 100_000):
    groups = [with_text(40 * step + number, "word " * 400) for number in range(40)]
    store.step(step, collected_of(groups))
    store.metrics(step, {"loss": 0.5})
    if step % 5 == 0:
        store.flush()
    print(step, flush=True)
"""


def test_kills_in_the_middle_of_writing_leave_whole_steps(tmp_path):
    moments = random.Random(0)
    stopped_at = set()
    for turn in range(5):
        directory = tmp_path / str(turn)
        process = subprocess.Popen([sys.executable, "-c", BUSY, str(directory)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        asked = moments.randint(8, 60)
        try:
            assert [int(process.stdout.readline()) for _ in range(asked)] == list(range(1, asked + 1))
            time.sleep(moments.uniform(0.0, 0.02))
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=PATIENCE_S)
        assert one(directory, "PRAGMA integrity_check") == ("ok",)
        steps = rows(directory, "SELECT step, drawn FROM steps ORDER BY step")
        assert steps == [(step, 40) for step in range(1, len(steps) + 1)]
        each = "SELECT step, count(DISTINCT draw), count(*), sum(length(text)) FROM answers GROUP BY step"
        assert rows(directory, each) == [(step, 40, 80, 80 * 2000) for step, _ in steps]
        assert len(steps) - len(rows(directory, "SELECT step FROM metrics")) in (0, 1)
        assert len(steps) >= asked - 6, "more than what was flushed is missing"
        stopped_at.add(len(steps))
    assert len(stopped_at) > 2, "the kills show nothing"


# A limit on the size of files stands for the disk: writing beyond it fails, and goes on when there is room again.
FULL = """
import resource, signal, sys
from pathlib import Path
from dapo.config.schema import LoggingConfig
from dapo.report.store.samples import SampleStore
from tests.support.store.stored import collected_of, with_text

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = SampleStore(Path(sys.argv[1]), LoggingConfig(), warn=lambda line: print(line, flush=True))
store.begin({})
store.resume(0)
for step in range(1, 9):
    if step in (3, 6):
        limit = 50_000 if step == 3 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    store.step(step, collected_of([with_text(10 * step + number, "x" * 5_000) for number in range(10)]))
    store._writer.flush(60)
store.close()
"""


def test_a_full_disk_costs_what_it_did_not_take_and_is_told_with_a_count(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and not done.stderr, done.stderr
    first, last = done.stdout.splitlines()
    assert "samples.sqlite cannot be written to (OperationalError" in first
    assert last.endswith("samples.sqlite lacks 3 entries that could not be written")
    assert rows(tmp_path, "SELECT step FROM steps") == [(1,), (2,), (6,), (7,), (8,)]
    assert one(tmp_path, "SELECT count(*) FROM responses") == (100,)
    assert one(tmp_path, "PRAGMA integrity_check") == ("ok",)


def test_a_disk_that_fails_is_told_once_until_it_takes_something_again(tmp_path, told):
    """Each warning of a run is an entry, too."""
    writer = writer_of(tmp_path / "absent", told)
    for step in range(5):
        writer.put(metric(step))
        assert writer.flush(PATIENCE_S)
        if step == 2:
            (tmp_path / "absent").mkdir()
    writer.close(PATIENCE_S)
    assert len(told) == 2 and "unable to open database file" in told[0] and "lacks 3 entries" in told[1]


def test_what_comes_while_another_program_has_a_lock_waits(tmp_path, told):
    writer = writer_of(tmp_path, told)
    writer.put(metric(1))
    assert writer.flush(PATIENCE_S)
    with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writer.put(metric(2), size=90)
        assert not writer.flush(0.1)
    written(writer, 3)
    assert steps_in(tmp_path) == [1, 2, 3] and not told


@pytest.fixture
def blocked(tmp_path, told) -> Iterator[tuple[Writer, threading.Event]]:
    """A writer whose thread stands still until the event is set."""
    go, taken = threading.Event(), threading.Event()
    writer = writer_of(tmp_path, told)
    writer.put(lambda connection: (taken.set(), go.wait(PATIENCE_S)))
    assert taken.wait(PATIENCE_S)
    yield writer, go
    go.set()
    writer.close(PATIENCE_S)


def test_what_waits_is_bounded_by_its_bytes(blocked, tmp_path, told, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_WAITING_BYTES", 100)
    writer, go = blocked
    for step, size in enumerate([150, 60, 1], 1):  # the first one alone may be larger
        writer.put(metric(step), size=size)
    assert len(told) == 1 and "too far behind" in told[0]
    go.set()
    assert writer.flush(PATIENCE_S)
    assert steps_in(tmp_path) == [1]
    for step in (5, 6):
        writer.put(metric(step), size=60)
        assert writer.flush(PATIENCE_S)
    assert steps_in(tmp_path) == [1, 5, 6], "what was written makes room"


def test_a_slow_disk_keeps_the_end_of_a_run_only_for_a_while(blocked, told):
    writer, go = blocked
    writer.close(0.05)
    writer.close(0.05)
    assert len(told) == 1 and "was not written to its end within 0.05 s" in told[0]


def test_nothing_is_opened_before_it_is_needed_and_nothing_taken_after_the_end(tmp_path, told):
    writer = writer_of(tmp_path, told)
    assert writer.flush(0.0) and not list(tmp_path.iterdir())
    written(writer, 1)
    assert writer.put(metric(2)).done.is_set()
    writer.close(PATIENCE_S)
    assert steps_in(tmp_path) == [1] and not told


def test_a_process_that_lost_the_directory_writes_nothing_more(tmp_path, told):
    held = [True]

    def guard() -> None:
        if not held[0]:
            raise LeaseLost("another run has the directory")

    writer = writer_of(tmp_path, told, guard)
    writer.put(metric(1))
    assert writer.flush(PATIENCE_S)
    held[0] = False
    written(writer, 2)
    assert steps_in(tmp_path) == [1] and "another run has the directory" in told[0]


def test_a_transaction_is_whole_or_not_at_all(tmp_path, told):
    writer = writer_of(tmp_path, told)

    def half(connection: sqlite3.Connection) -> None:
        metric(1)(connection)
        raise ValueError("a row that is none")

    writer.put(half)
    written(writer, 2)
    assert steps_in(tmp_path) == [2] and "a row that is none" in told[0]


def test_a_damaged_file_is_set_aside_and_costs_nothing_more(tmp_path, told):
    (tmp_path / NAME).write_bytes(b"")
    written(writer_of(tmp_path, told), 1)
    assert steps_in(tmp_path) == [1] and not told, "an empty one is none"
    writer = writer_of(tmp_path, told)
    for step in range(2, 400):
        writer.put(metric(step, "x" * 200))
    assert writer.flush(PATIENCE_S)
    writer.close(PATIENCE_S)
    whole = (tmp_path / NAME).read_bytes()
    for damaged in (whole[:8192] + b"\xff" * (len(whole) - 8192), b"no database, whatever its name is" * 40):
        told.clear()
        (tmp_path / NAME).write_bytes(damaged)
        written(writer_of(tmp_path, told), 1000)
        assert steps_in(tmp_path) == [1000] and len(told) == 1 and "is damaged" in told[0]
    assert (tmp_path / "samples.damaged.sqlite").read_bytes() == damaged


def test_a_database_of_another_version_is_set_aside(tmp_path, told):
    opened(tmp_path / NAME, told).close()
    with closing(sqlite3.connect(tmp_path / NAME, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    written(writer_of(tmp_path, told), 1)
    assert steps_in(tmp_path) == [1]
    now = f"{tmp_path}/samples.version_{VERSION + 1}.sqlite"
    assert told == [f"{tmp_path}/{NAME} is of version {VERSION + 1}, not {VERSION}; it is now {now}"]


def test_a_database_that_lacks_new_tables_and_indexes_gets_them_and_keeps_what_it_has(tmp_path, told):
    with closing(opened(tmp_path / NAME, told)) as connection:
        metric(1)(connection)
        connection.execute("DROP TABLE returned")
        connection.execute("DROP INDEX responses_with_text")
        connection.execute(f"PRAGMA user_version = {GROWS[0]}")
    writer = writer_of(tmp_path, told)
    writer.put(lambda connection: connection.execute("INSERT INTO returned VALUES (2, 7, 'stale')"))
    written(writer, 2)
    assert steps_in(tmp_path) == [1, 2] and told == []
    assert one(tmp_path, "PRAGMA user_version") == (VERSION,)
    assert one(tmp_path, "SELECT count(*) FROM returned") == (1,)
    assert one(tmp_path, "SELECT count(*) FROM sqlite_schema WHERE name = 'responses_with_text'") == (1,)
