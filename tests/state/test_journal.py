"""The journal's files: what was appended is read again, and damage costs the damaged record alone."""

import errno
import os
import random
from pathlib import Path

import pytest

from dapo.sampling.draws import BufferState
from dapo.sampling.journaled import recover
from dapo.state import durable
from dapo.state.journal import HEAD_BYTES, LENGTH_BYTES, MARK, UnreadableJournal, framed, whole_records
from tests.support.sampling.verdicts import draw_of
from tests.support.state.journals import opened, read

RECORDS = [bytes([number]) * (3 + 40 * number) for number in range(5)]

KEY = b"key"


def written(directory: Path, version: int = 0, records: list[bytes] = RECORDS) -> Path:
    """The segment of a journal that was closed."""
    journal = opened(directory)
    journal.restart(version, [])
    for record in records:
        journal.append(lambda record=record: record)
    journal.close()
    return directory / "journal" / f"after_{version:06d}.log"


def places() -> list[int]:
    """Where each record of `RECORDS` starts."""
    return [sum(HEAD_BYTES + len(record) for record in RECORDS[:number]) for number in range(len(RECORDS))]


def test_what_was_appended_is_read_in_its_order(tmp_path):
    written(tmp_path)
    assert read(tmp_path) == (RECORDS, [])


def test_without_a_directory_there_are_no_records(tmp_path):
    assert read(tmp_path) == ([], [])


@pytest.mark.parametrize("cut", [1, 10, 163, HEAD_BYTES + 162])
def test_a_torn_last_record_costs_that_record_only(tmp_path, cut):
    segment = written(tmp_path)
    os.truncate(segment, segment.stat().st_size - cut)
    found, warnings = read(tmp_path)
    assert found == RECORDS[:-1] and len(warnings) == 1 and "after_000000.log" in warnings[0]
    again = opened(tmp_path)
    again.begin(1)
    again.append(lambda: b"next")
    again.close()
    assert read(tmp_path)[0] == [*RECORDS[:-1], b"next"]


def test_what_follows_a_torn_record_in_the_same_file_is_read(tmp_path):
    """A disk that was full takes writes again."""
    segment = written(tmp_path)
    torn = segment.read_bytes()[:-30]
    segment.write_bytes(torn + framed(b"later", opened(tmp_path)._key))
    assert read(tmp_path)[0] == [*RECORDS[:-1], b"later"]


@pytest.mark.parametrize("number", range(len(RECORDS)))
@pytest.mark.parametrize(
    "offset",
    [
        pytest.param(0, id="mark"),
        pytest.param(len(MARK), id="length"),
        pytest.param(len(MARK) + LENGTH_BYTES - 1, id="huge length"),
        pytest.param(len(MARK) + LENGTH_BYTES + 3, id="digest"),
        pytest.param(HEAD_BYTES + 1, id="record"),
    ],
)
@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_costs_one_record(tmp_path, number, offset, bit):
    segment = written(tmp_path)
    data = bytearray(segment.read_bytes())
    data[places()[number] + offset] ^= bit
    segment.write_bytes(data)
    found, warnings = read(tmp_path)
    assert found == RECORDS[:number] + RECORDS[number + 1 :] and len(warnings) == 1


@pytest.mark.parametrize("seed", range(30))
def test_damage_is_never_misread(seed):
    """Bytes cut out, doubled, overwritten: whatever is returned was written, in the order of the file."""
    rng = random.Random(seed)
    records = [rng.randbytes(rng.randrange(60)) + MARK * rng.randrange(3) for _ in range(12)]
    data = b"".join(framed(record, KEY) for record in records)
    start, size = rng.randrange(len(data)), rng.randrange(200)
    patch = rng.choice([b"", rng.randbytes(50), data[start : start + size] * 2, MARK, bytes(size)])
    found, lost = whole_records(data[:start] + patch + data[start + size :], KEY)
    assert all(record in records for record in found) and len(found) >= len(records) - 2 - size // HEAD_BYTES
    assert lost == len(data[:start] + patch + data[start + size :]) - sum(HEAD_BYTES + len(each) for each in found)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, MARK, MARK * 50, b"text\n"])
def test_a_file_without_a_record_gives_none(tmp_path, content):
    written(tmp_path).write_bytes(content)
    found, warnings = read(tmp_path)
    assert found == [] and len(warnings) == bool(content)


def test_records_of_other_settings_are_not_read(tmp_path):
    written(tmp_path)
    warnings: list[str] = []
    assert opened(tmp_path, warnings, settings="n=8").read(0) == [] and "other settings" in warnings[0]


def test_a_segment_that_can_be_read_at_a_later_try_is(tmp_path, monkeypatch):
    """What is not read is generated again, and `restart` writes over it."""
    written(tmp_path)
    failures = [OSError(errno.EIO, "of the disk"), OSError(errno.ESTALE, "of the network")]
    read_bytes = Path.read_bytes

    def failing(path: Path) -> bytes:
        if failures:
            raise failures.pop()
        return read_bytes(path)

    monkeypatch.setattr(durable, "WAIT_S", 0.0)
    monkeypatch.setattr(Path, "read_bytes", failing)
    assert read(tmp_path) == (RECORDS, [])


def test_a_segment_that_no_try_can_read_refuses_the_start_and_is_there_afterwards(tmp_path, monkeypatch):
    segment = written(tmp_path)
    before = segment.read_bytes()
    read_bytes = Path.read_bytes

    def failing(path: Path) -> bytes:
        raise OSError(errno.EIO, "of the disk")

    monkeypatch.setattr(durable, "WAIT_S", 0.0)
    monkeypatch.setattr(Path, "read_bytes", failing)
    state = BufferState(retry=[], draws={}, tokens={}, rate=[1.0, 1.0])
    with pytest.raises(UnreadableJournal, match=r"after_000000\.log cannot be read .*of the disk.*tried 4 times"):
        recover(opened(tmp_path), state, 0, draw_of, version=0)
    assert read_bytes(segment) == before


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
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == ["after_000000.log", "after_000005.log"]
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


def test_pruning_keeps_what_the_kept_checkpoints_need(tmp_path):
    for version in (0, 5, 10):
        written(tmp_path, version)
    opened(tmp_path).prune(5)
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == ["after_000005.log", "after_000010.log"]
    opened(tmp_path).remove()
    assert list((tmp_path / "journal").iterdir()) == []
