"""The thread that writes: whole transactions whenever it is killed, what waits is bounded, no disk ends a run."""

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

from dapo.state.lease import LeaseLost
from dapo.store import writer as writer_module
from dapo.store.writer import Writer
from tests.support.store.writers import PATIENCE_S, metric, read, steps_in, writer_of

# Steps of 40 groups of 4 responses of 2 kB, as fast as the thread takes them.
BUSY = """
import sys
from dataclasses import replace
from pathlib import Path
from dapo.config.schema import LoggingConfig
from dapo.store.samples import SampleStore
from tests.support.store.stored import collected_of, with_text

store = SampleStore(Path(sys.argv[1]), LoggingConfig(), warn=print)
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


@pytest.mark.parametrize("pause", [0.0, 3600.0])
def test_a_disk_that_fails_for_days_is_told_now_and_then(pause, tmp_path, told, monkeypatch):
    monkeypatch.setattr(writer_module, "TELL_S", pause)
    writer = writer_of(tmp_path / "absent", told)
    for step in range(5):
        writer.put(metric(step), responses=2)
    writer.close(PATIENCE_S)
    counts = [int(line.partition(" entries")[0].rpartition(" ")[2]) for line in told]
    assert counts == ([1, 5] if pause else [1, 2, 3, 4, 5])
    assert "unable to open database file" in told[0] and "5 entries with 10 responses" in told[-1]


def test_ten_kills_in_the_middle_of_writing_leave_whole_steps(tmp_path):
    moments = random.Random(0)
    stopped_at = []
    for turn in range(10):
        directory = tmp_path / str(turn)
        directory.mkdir()
        process = subprocess.Popen([sys.executable, "-c", BUSY, str(directory)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        asked = moments.randint(8, 60)
        try:
            assert [int(process.stdout.readline()) for _ in range(asked)] == list(range(1, asked + 1))
            time.sleep(moments.uniform(0.0, 0.02))
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=PATIENCE_S)
        assert read(directory, "PRAGMA integrity_check") == [("ok",)]
        steps = read(directory, "SELECT step, drawn FROM steps ORDER BY step")
        assert steps == [(step, 40) for step in range(1, len(steps) + 1)]
        each = "SELECT step, count(DISTINCT draw), count(*), sum(length(text)) FROM answers GROUP BY step"
        assert read(directory, each) == [(step, 40, 80, 80 * 2000) for step, _ in steps]
        assert len(steps) - len(read(directory, "SELECT step FROM metrics")) in (0, 1)
        assert len(steps) >= asked - 6, "more than what was flushed is missing"
        stopped_at.append(len(steps))
    assert len(set(stopped_at)) > 3, "the kills show nothing"


# A limit on the size of files stands for the disk: writing beyond it fails, and goes on when there is room again.
FULL = """
import resource, signal, sys
from pathlib import Path
from dapo.config.schema import LoggingConfig
from dapo.store.samples import SampleStore
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
    print("step", step, flush=True)
    if step == 4:
        store.resume(1)
store.close()
"""


def test_a_full_disk_costs_what_it_did_not_take_and_is_told_with_a_count(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("step ")]
    assert len(lines) == 2, lines
    assert "samples.sqlite cannot be written to (OperationalError" in lines[0]
    assert lines[0].endswith("the run goes on, 1 entries with 20 responses are missing so far")
    assert lines[1].endswith("samples.sqlite: 4 entries with 60 responses are missing")
    assert done.stdout.count("step ") == 8
    # What is owed was done first: step 2 is taken back, although there was no room when that was asked for.
    assert read(tmp_path, "SELECT step FROM steps") == [(1,), (6,), (7,), (8,)]
    assert read(tmp_path, "SELECT count(*) FROM responses") == [(80,)]
    noted = read(tmp_path, "SELECT message FROM events WHERE kind = 'missing' ORDER BY event DESC")
    assert noted[0] == ("4 entries with 60 responses are missing",)
    assert read(tmp_path, "PRAGMA integrity_check") == [("ok",)]


def test_a_lock_of_another_program_is_waited_for_and_then_costs_an_entry(tmp_path, told, monkeypatch):
    monkeypatch.setattr(writer_module, "BUSY_S", 0.05)
    writer = writer_of(tmp_path, told)
    writer.put(metric(1))
    assert writer.flush(PATIENCE_S) and not told
    with closing(sqlite3.connect(tmp_path / "samples.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writer.put(metric(2), responses=7)
        writer.put(metric(3), responses=5)
        assert writer.flush(PATIENCE_S)
        assert len(told) == 1 and "database is locked" in told[0]
    writer.put(metric(4))
    writer.close(PATIENCE_S)
    assert steps_in(tmp_path) == [1, 4]
    assert told[1:] == [f"{tmp_path}/samples.sqlite: 2 entries with 12 responses are missing"]
    assert read(tmp_path, "SELECT message FROM events") == [("2 entries with 12 responses are missing",)]


def test_a_reader_keeps_nobody_waiting(tmp_path, told):
    writer = writer_of(tmp_path, told)
    writer.put(metric(1))
    assert writer.flush(PATIENCE_S)
    with closing(sqlite3.connect(tmp_path / "samples.sqlite", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT step FROM metrics").fetchall() == [(1,)]
        writer.put(metric(2))
        assert writer.flush(PATIENCE_S)
        assert steps_in(tmp_path) == [1, 2]
        assert reader.execute("SELECT step FROM metrics").fetchall() == [(1,)]
    writer.close(PATIENCE_S)
    assert not told


@pytest.fixture
def blocked(tmp_path, told) -> Iterator[tuple[Writer, threading.Event]]:
    """A writer whose thread stands still until the event is set."""
    go = threading.Event()
    writer = writer_of(tmp_path, told)
    writer.put(lambda connection: go.wait(PATIENCE_S))
    yield writer, go
    go.set()
    writer.close(PATIENCE_S)


def test_what_waits_is_bounded_by_its_bytes(blocked, tmp_path, told, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_WAITING_BYTES", 100)
    writer, go = blocked
    for step, size in enumerate([150, 60, 0, 1], 1):  # the first one alone may be larger
        writer.put(metric(step), responses=3, size=size)
    assert len(told) == 1 and "too far behind" in told[0]
    go.set()
    assert writer.flush(PATIENCE_S)
    assert steps_in(tmp_path) == [1]
    for step in (5, 6):
        writer.put(metric(step), size=60)
        assert writer.flush(PATIENCE_S)
    assert steps_in(tmp_path) == [1, 5, 6], "what was written makes room"
    assert read(tmp_path, "SELECT message FROM events") == [("3 entries with 9 responses are missing",)]


def test_what_waits_is_bounded_in_number_but_for_what_is_owed(blocked, tmp_path, told, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_WAITING", 3)
    writer, go = blocked
    deadline = time.monotonic() + PATIENCE_S
    while writer._queue.qsize() and time.monotonic() < deadline:  # the thread takes the item that blocks it
        time.sleep(0.01)
    for step in range(1, 6):
        writer.put(metric(step), owed=step == 5)
    go.set()
    assert writer.flush(PATIENCE_S)
    assert steps_in(tmp_path) == [1, 2, 3, 5]


def test_a_slow_disk_keeps_the_end_of_a_run_only_for_a_while(blocked, told):
    writer, go = blocked
    writer.close(0.05)
    assert len(told) == 1 and "was not written to its end within 0.05 s" in told[0]
    writer.close(0.05)
    assert len(told) == 1


def test_after_the_end_nothing_is_taken(tmp_path, told):
    writer = writer_of(tmp_path, told)
    writer.put(metric(1))
    writer.close(PATIENCE_S)
    assert writer.put(metric(2)).done.is_set()
    writer.close(PATIENCE_S)
    assert steps_in(tmp_path) == [1] and not told


def test_nothing_is_opened_before_it_is_needed(tmp_path, told):
    writer = writer_of(tmp_path, told)
    assert writer.flush(0.0)
    writer.close(0.0)
    assert not list(tmp_path.iterdir())


def test_a_process_that_lost_the_directory_writes_nothing_more(tmp_path, told):
    held = [True]

    def guard() -> None:
        if not held[0]:
            raise LeaseLost("another run has the directory")

    writer = writer_of(tmp_path, told, guard)
    writer.put(metric(1))
    assert writer.flush(PATIENCE_S)
    held[0] = False
    writer.put(metric(2))
    writer.close(PATIENCE_S)
    assert steps_in(tmp_path) == [1] and "another run has the directory" in told[0]


def test_memory_of_a_step_is_let_go_when_it_is_written(tmp_path, told):
    writer = writer_of(tmp_path, told)
    mark = threading.Event()

    class Heavy:
        def __call__(self, connection: sqlite3.Connection) -> None:
            pass

        def __del__(self) -> None:
            mark.set()

    writer.put(Heavy())
    assert mark.wait(PATIENCE_S), "the thread holds it until the next one comes"
    writer.close(PATIENCE_S)
