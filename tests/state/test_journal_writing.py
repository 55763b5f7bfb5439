"""The journal's thread: what it leaves on a disk that fails or is slow, and what a kill leaves."""

import os
import signal
import subprocess
import sys
import threading
import time

from dapo.state import journal as journal_module
from dapo.state.journal import MARK
from tests.support.state.journals import opened, read


def test_nothing_is_kept_before_a_segment_opens_and_after_the_end(tmp_path):
    journal = opened(tmp_path)
    journal.append(lambda: b"early")
    journal.restart(0, [])
    journal.close()
    journal.append(lambda: b"late")
    journal.close()
    assert read(tmp_path) == ([], [])


def test_a_failing_disk_is_told_once_and_tried_again_at_the_next_checkpoint(tmp_path, monkeypatch):
    warnings: list[str] = []
    journal = opened(tmp_path, warnings)
    append = journal_module._Segment.append
    full = threading.Event()

    def short(self, record: bytes) -> None:
        if full.is_set():
            assert self._file is not None
            self._file.write(MARK)
            raise OSError(28, "No space left on device")
        append(self, record)

    monkeypatch.setattr(journal_module._Segment, "append", short)
    journal.restart(0, [])
    journal.append(lambda: b"before")
    wait_for(lambda: read(tmp_path)[0] == [b"before"])
    full.set()
    for _ in range(5):
        journal.append(lambda: b"lost")
    wait_for(lambda: bool(warnings))
    full.clear()
    journal.append(lambda: b"lost")
    journal.begin(0)
    journal.append(lambda: b"same segment")
    journal.begin(2)
    journal.append(lambda: b"next segment")
    journal.close()
    assert len(warnings) == 1 and "No space left" in warnings[0]
    assert read(tmp_path)[0] == [b"before", b"same segment", b"next segment"]


def test_a_directory_that_cannot_be_made_ends_nothing(tmp_path):
    (tmp_path / "journal").write_text("in the way")
    warnings: list[str] = []
    journal = opened(tmp_path, warnings)
    assert journal.read(0) == []
    journal.restart(0, [])
    journal.append(lambda: b"lost")
    journal.begin(1)
    journal.append(lambda: b"lost")
    journal.close()
    assert len(warnings) == 2 and all("until the next checkpoint" in line for line in warnings)


def test_a_record_that_cannot_be_encoded_ends_nothing(tmp_path):
    warnings: list[str] = []
    journal = opened(tmp_path, warnings)
    journal.restart(0, [])
    journal.append(lambda: "no surrogates \ud800".encode())
    wait_for(lambda: bool(warnings))
    journal.close()
    assert "surrogates" in warnings[0]


def test_encoding_and_writing_are_left_to_the_thread(tmp_path):
    journal = opened(tmp_path)
    journal.restart(0, [])
    names: list[str] = []
    slow = threading.Event()

    def encode() -> bytes:
        slow.wait(10)
        names.append(threading.current_thread().name)
        return b"record"

    began = time.monotonic()
    for _ in range(100):
        journal.append(encode)
    assert time.monotonic() - began < 5 and names == []
    slow.set()
    journal.close()
    assert set(names) == {"journal"} and read(tmp_path)[0] == [b"record"] * 100


def test_a_disk_that_is_too_slow_costs_groups_and_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "MAX_WAITING", 3)
    warnings: list[str] = []
    journal = opened(tmp_path, warnings)
    journal.restart(0, [])
    slow = threading.Event()
    journal.append(lambda: bytes(slow.wait(10)))
    wait_for(journal._queue.empty)
    for _ in range(9):
        journal.append(lambda: b"record")
    slow.set()
    journal.close()
    assert read(tmp_path)[0] == [b"\0", *[b"record"] * 3] and len(warnings) == 1 and "behind" in warnings[0]


def test_there_is_at_most_one_fsync_a_second_and_one_soon(tmp_path, monkeypatch):
    journal = opened(tmp_path)
    journal.restart(0, [])
    wait_for((tmp_path / "journal" / "after_000000.log").exists)
    time.sleep(0.1)
    synced: list[float] = []
    fsync = os.fsync
    monkeypatch.setattr(journal_module.os, "fsync", lambda fd: synced.append(time.monotonic()) or fsync(fd))
    began = time.monotonic()
    while time.monotonic() - began < 2.3:
        journal.append(lambda: b"record")
        time.sleep(0.005)
    assert 2 <= len(synced) <= 3
    time.sleep(2.2)
    assert len(synced) <= 4, "nothing new, nothing to sync"
    journal.close()


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


def wait_for(holds) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)
