"""The journal's files and its thread: what was appended is read again, damage costs the damaged record alone, and no
disk ends a run."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dapo.sampling.draws import BufferState
from dapo.state import journal as journal_module
from dapo.state.groups import recover
from dapo.state.journal import HEAD_BYTES, LENGTH_BYTES, Journal, framed, whole_records
from dapo.state.manifest import Unreadable
from tests.support.sampling.verdicts import draw_of
from tests.support.state.claims import fails, names

RECORDS = [bytes([number]) * (3 + 40 * number) for number in range(5)]
KEY = b"key"


def opened(directory: Path, warnings: list[str] | None = None, settings: str = "n=4") -> Journal:
    return Journal(directory / "journal", settings, warn=(warnings if warnings is not None else []).append)


def read(directory: Path, version: int = 0) -> tuple[list[bytes], list[str]]:
    warnings: list[str] = []
    return opened(directory, warnings).read(version), warnings


def written(directory: Path, version: int = 0, records: list[bytes] = RECORDS) -> Path:
    journal = opened(directory)
    journal.restart(version, [])
    for record in records:
        journal.append(lambda record=record: record)
    journal.close()
    return directory / "journal" / f"after_{version:06d}.log"


def wait_for(holds) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


def test_segments_that_only_the_memory_of_the_nodes_needed_go_with_it(tmp_path):
    for version in range(6):
        written(tmp_path, version)
    opened(tmp_path).prune(5, after=2)
    assert sorted(path.name[-5] for path in (tmp_path / "journal").iterdir()) == list("0125")


def test_what_was_appended_while_a_segment_is_open_is_read_in_its_order(tmp_path):
    assert read(tmp_path) == ([], [])
    journal = opened(tmp_path)
    journal.append(lambda: b"early")
    journal.restart(0, [])
    for record in RECORDS:
        journal.append(lambda record=record: record)
    journal.close()
    journal.append(lambda: b"late")
    journal.close()
    assert read(tmp_path) == (RECORDS, [])


@pytest.mark.parametrize("cut", [1, 10, 163, HEAD_BYTES + 162])
def test_a_torn_last_record_costs_that_record_only(tmp_path, cut):
    segment = written(tmp_path)
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-cut])
    found, warnings = read(tmp_path)
    assert found == RECORDS[:-1] and len(warnings) == 1 and "after_000000.log" in warnings[0]
    again = opened(tmp_path)
    again.begin(1)
    again.append(lambda: b"next")
    again.close()
    assert read(tmp_path)[0] == [*RECORDS[:-1], b"next"]


@pytest.mark.parametrize("number", [0, 2, 4])
@pytest.mark.parametrize(
    "offset",
    [
        pytest.param(0, id="length"),
        pytest.param(LENGTH_BYTES - 1, id="huge length"),
        pytest.param(LENGTH_BYTES + 3, id="digest"),
        pytest.param(HEAD_BYTES + 1, id="record"),
    ],
)
@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_ends_the_segment(tmp_path, number, offset, bit):
    segment = written(tmp_path)
    data = bytearray(segment.read_bytes())
    data[sum(HEAD_BYTES + len(record) for record in RECORDS[:number]) + offset] ^= bit
    segment.write_bytes(data)
    found, warnings = read(tmp_path)
    assert found == RECORDS[:number] and len(warnings) == 1


@pytest.mark.parametrize("seed", range(30))
def test_damage_is_never_misread(seed):
    rng = random.Random(seed)
    records = [rng.randbytes(rng.randrange(60)) for _ in range(12)]
    data = b"".join(framed(record, KEY) for record in records)
    start, size = rng.randrange(len(data)), rng.randrange(200)
    patch = rng.choice([b"", rng.randbytes(50), bytes(size)])
    damaged = data[:start] + patch + data[start + size :]
    found, lost = whole_records(damaged, KEY)
    assert found == records[: len(found)]
    assert lost == len(damaged) - sum(HEAD_BYTES + len(each) for each in found)


def test_records_of_other_settings_are_not_read(tmp_path):
    written(tmp_path)
    warnings: list[str] = []
    assert opened(tmp_path, warnings, settings="n=8").read(0) == [] and "other settings" in warnings[0]


def test_a_segment_that_cannot_be_read_is_not_written_over(tmp_path):
    segment = written(tmp_path)
    before = segment.read_bytes()
    state = BufferState(retry=[], draws={}, tokens={}, rate=[1.0, 1.0])
    with pytest.MonkeyPatch.context() as patch:
        fails(patch, Path, "read_bytes", 4)
        with pytest.raises(Unreadable, match=r"after_000000\.log cannot be read .*of the disk.*tried 4 times"):
            recover(opened(tmp_path), state, 0, draw_of, version=0)
    assert segment.read_bytes() == before
    with pytest.MonkeyPatch.context() as patch:
        fails(patch, Path, "read_bytes", 3)
        assert read(tmp_path) == (RECORDS, []), "at a later try"


def test_segments_are_read_from_a_version_on(tmp_path):
    journal = opened(tmp_path)
    for version in (0, 3, 3, 20, 1_000_000):
        journal.begin(version)
        journal.append(lambda version=version: b"%d" % version)
    journal.close()
    assert read(tmp_path, 3)[0] == [b"3", b"3", b"20", b"1000000"]
    assert read(tmp_path, 21)[0] == [b"1000000"]


def test_a_segment_of_a_course_that_was_left_is_not_appended_to(tmp_path):
    written(tmp_path, 0)
    written(tmp_path, 5, [b"left"])
    journal = opened(tmp_path)
    journal.version = 4
    journal.begin(5)
    journal.append(lambda: b"new")
    journal.close()
    assert read(tmp_path, 5)[0] == [b"new"]


def test_restarting_keeps_the_given_records_and_removes_later_segments(tmp_path):
    for version in (0, 5, 10, 12):
        written(tmp_path, version)
    journal = opened(tmp_path)
    journal.restart(5, RECORDS[1:3])
    journal.append(lambda: b"next")
    journal.close()
    assert names(tmp_path / "journal") == ["after_000000.log", "after_000005.log"]
    assert read(tmp_path, 5) == ([*RECORDS[1:3], b"next"], [])


@pytest.mark.parametrize("moment", ["fsync", "replace", "unlink"])
def test_a_crash_while_restarting_loses_no_record(tmp_path, monkeypatch, moment):
    for version in (5, 10):
        written(tmp_path, version)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*((os, "fsync") if moment == "fsync" else (Path, moment)), crash)
    with pytest.raises(KeyboardInterrupt):
        opened(tmp_path).restart(5, RECORDS[1:3])
    assert set(RECORDS[1:3]) <= set(read(tmp_path, 5)[0])


def test_a_failing_disk_is_told_once_and_tried_again_at_the_next_checkpoint(tmp_path, monkeypatch):
    warnings: list[str] = []
    journal = opened(tmp_path, warnings)
    full = threading.Event()

    def failing(record: bytes, key: bytes) -> bytes:
        if full.is_set():
            raise OSError(28, "No space left on device")
        return framed(record, key)

    monkeypatch.setattr(journal_module, "framed", failing)
    journal.restart(0, [])
    journal.append(lambda: b"before")
    wait_for(lambda: read(tmp_path)[0] == [b"before"])
    full.set()
    for _ in range(5):
        journal.append(lambda: b"lost")
    wait_for(lambda: bool(warnings) and journal._queue.empty())
    full.clear()
    journal.append(lambda: b"lost")
    journal.begin(2)
    journal.append(lambda: b"next segment")
    journal.close()
    assert len(warnings) == 1 and "No space left" in warnings[0]
    assert read(tmp_path)[0] == [b"before", b"next segment"]


def test_neither_a_directory_that_cannot_be_made_nor_a_record_that_cannot_be_encoded_ends_a_run(tmp_path):
    warnings: list[str] = []
    (tmp_path / "journal").write_text("in the way")
    journal = opened(tmp_path, warnings)
    assert journal.read(0) == []
    journal.restart(0, [])
    journal.begin(1)
    journal.append(lambda: b"lost")
    journal.close()
    assert len(warnings) == 2 and all("until the next checkpoint" in line for line in warnings)
    (tmp_path / "journal").unlink()
    journal.restart(0, [])
    journal.append(lambda: "no surrogates \ud800".encode())
    journal.close()
    assert "surrogates" in warnings[2]


def test_a_slow_disk_holds_nobody_up_and_costs_groups_and_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "MAX_WAITING", 4)
    journal = opened(tmp_path)
    journal.restart(0, [])
    threads: list[str] = []
    slow = threading.Event()

    def encode() -> bytes:
        slow.wait(10)
        threads.append(threading.current_thread().name)
        return b"record"

    journal.append(encode)
    wait_for(journal._queue.empty)
    for _ in range(9):
        journal.append(encode)
    assert threads == []
    slow.set()
    journal.close()
    assert read(tmp_path)[0] == [b"record"] * 5 and threads == ["journal"] * 5


WRITER = """
import sys, time
from pathlib import Path
from dapo.state.journal import Journal
journal = Journal(Path(sys.argv[1]) / "journal", "n=4", warn=print)
journal.restart(0, [])
for number in range(10**6):
    journal.append(lambda number=number: b"%d" % number)
    if number == 200:
        print("written", flush=True)
    time.sleep(0.0005)
"""


def test_what_the_thread_wrote_outlives_a_kill(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    found, _ = read(tmp_path)
    assert found == [b"%d" % number for number in range(len(found))] and len(found) > 200
