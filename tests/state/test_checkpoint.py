"""Checkpoints are complete or not there: faults of every kind are found, named, and stepped over."""

import asyncio
import errno
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dapo.sampling.draws import BufferState
from dapo.sampling.driver_state import DriverState
from dapo.state import durable
from dapo.state.checkpoint import BrokenCheckpoint, CheckpointStore, step_of, verify


def driver_state(step: int) -> DriverState:
    draws, tokens = {"trained": 8 * step}, {"trained": 40}
    buffer = BufferState(retry=[10 * step, 10 * step + 1], rate=[1.5, 2.0], draws=draws, tokens=tokens)
    return DriverState(version=step, buffer=buffer)


def save(store: CheckpointStore, step: int, text: str = "weights") -> None:
    async def write() -> None:
        async with store.writing(step) as directory:
            (directory / "actor").mkdir()
            (directory / "actor" / "rank0.bin").write_text(f"{text} of step {step}")
            driver_state(step).write(directory)

    asyncio.run(write())


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def state_text(version: object = 1, **changes: object) -> str:
    return json.dumps(
        asdict(driver_state(1)) | {"version": version, "buffer": asdict(driver_state(1).buffer) | changes}
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_what_is_written_is_what_is_read(root: Path) -> None:
    store = CheckpointStore(root, keep=0)
    assert store.latest() is None
    save(store, 5)
    save(store, 10)
    found = CheckpointStore(root, keep=0).latest()
    assert found == root / "step_000010" and step_of(found) == 10
    assert DriverState.read(found) == driver_state(10)
    assert (found / "actor" / "rank0.bin").read_text() == "weights of step 10"
    assert (root / "LATEST").read_text() == "step_000010\n"
    manifest = json.loads((found / "manifest.json").read_text())
    assert manifest["files"].keys() == {"actor/rank0.bin", "driver.json"}
    assert manifest["files"]["actor/rank0.bin"]["bytes"] == len("weights of step 10")


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        pytest.param(0, [1, 2, 3, 4], id="all"),
        pytest.param(1, [4], id="one"),
        pytest.param(3, [2, 3, 4], id="three"),
    ],
)
def test_the_newest_are_kept(keep: int, left: list[int], root: Path) -> None:
    store = CheckpointStore(root, keep=keep)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert names(root) == ["LATEST", *(f"step_{step:06d}" for step in left)]


def test_an_error_while_writing_leaves_nothing(root: Path) -> None:
    store = CheckpointStore(root, keep=3)
    save(store, 1)

    async def fail() -> None:
        async with store.writing(2) as directory:
            (directory / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(fail())
    assert names(root) == ["LATEST", "step_000001"]
    assert store.latest() == root / "step_000001"


def test_no_whole_checkpoint_is_an_error_and_not_a_new_start(root: Path) -> None:
    store = CheckpointStore(root, keep=3)
    save(store, 5)
    save(store, 6)
    broken = [root / "step_000005" / "driver.json", root / "step_000006" / "manifest.json"]
    for path in broken:
        path.unlink()
    with pytest.raises(ValueError, match="no checkpoint under .* is whole.*remove that directory") as error:
        store.latest()
    assert all(str(path) in str(error.value) for path in broken)


@pytest.mark.parametrize("latest", ["step_000005", "step_000099", "", "../elsewhere", "rubbish\n", b"\xff\xfe", None])
def test_the_newest_whole_one_counts_whatever_latest_says(
    latest: str | bytes | None, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LATEST is for people: a crash between the rename and the name must not lose a step."""
    store = CheckpointStore(root, keep=3)
    save(store, 5)
    save(store, 10)
    (root / "LATEST").unlink()
    if latest is not None:
        (root / "LATEST").write_bytes(latest if isinstance(latest, bytes) else latest.encode())
    with caplog.at_level(logging.WARNING):
        assert store.latest() == root / "step_000010" == store.latest()
    told = [record.message for record in caplog.records]
    assert len(told) == (latest is not None) and all(
        "the newest whole checkpoint is step_000010" in line for line in told
    )
    save(store, 11)
    assert (root / "LATEST").read_text() == "step_000011\n"


def test_a_course_that_was_left_is_set_aside_and_cannot_return(root: Path) -> None:
    store = CheckpointStore(root, keep=0)
    for step in (5, 10, 15):
        save(store, step)
    assert store.go_back_to(root / "step_000005") == [root / "step_000010", root / "step_000015"]
    assert store.latest() == root / "step_000005" and store.steps() == [5]
    assert CheckpointStore(root, keep=0).latest() == root / "step_000015", "until the start is not refused any more"
    store.leave_later()
    assert CheckpointStore(root, keep=0).latest() == root / "step_000005"
    assert names(root) == ["LATEST", "left_000010", "left_000015", "step_000005"]
    save(store, 10, "another course")
    assert store.go_back_to(root / "step_000005") == [root / "step_000010"]
    store.leave_later()
    assert (root / "left_000010" / "actor" / "rank0.bin").read_text() == "another course of step 10"


def test_going_back_to_a_broken_one_changes_nothing(root: Path) -> None:
    store = CheckpointStore(root, keep=0)
    save(store, 5)
    save(store, 10)
    (root / "step_000005" / "driver.json").unlink()
    with pytest.raises(BrokenCheckpoint, match="driver.json cannot be read"):
        store.go_back_to(root / "step_000005")
    assert names(root) == ["LATEST", "step_000005", "step_000010"]


def test_later_checkpoints_of_a_course_that_was_left_are_removed_by_the_first_of_the_new_one(root: Path) -> None:
    store = CheckpointStore(root, keep=1)
    save(CheckpointStore(root, keep=0), 5)
    save(CheckpointStore(root, keep=0), 10)
    save(store, 6)
    assert names(root) == ["LATEST", "step_000006"]


def test_the_checkpoint_of_another_run_counts_until_there_is_one_here(root: Path, tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path / "other", keep=0), 7)
    store = CheckpointStore(root, keep=0, origin=tmp_path / "other" / "step_000007")
    assert store.latest() == tmp_path / "other" / "step_000007" and store.completed(8) is None
    save(store, 8)
    assert store.latest() == store.completed(8) == root / "step_000008"
    store = CheckpointStore(root.with_name("third"), keep=0, origin=tmp_path / "other" / "step_000007")
    (tmp_path / "other" / "step_000007" / "driver.json").write_text("{}")
    with pytest.raises(ValueError, match=r"`checkpoint.resume` .*driver.json has 2 bytes.*give another checkpoint"):
        store.latest()


def test_what_the_run_adds_is_part_of_the_checkpoint_and_a_guard_stops_it(root: Path) -> None:
    def refuse() -> None:
        raise RuntimeError("taken over")

    save(CheckpointStore(root, keep=0, record=lambda directory: (directory / "note").write_text("x") and None), 1)
    assert (root / "step_000001" / "note").read_text() == "x"
    verify(root / "step_000001")
    with pytest.raises(RuntimeError, match="taken over"):
        save(CheckpointStore(root, keep=0, guard=refuse), 1, "other weights")
    assert names(root) == ["LATEST", "step_000001"]
    assert (root / "step_000001" / "actor" / "rank0.bin").read_text() == "weights of step 1"


def test_a_driver_state_of_before_the_draws_of_the_open_update_were_counted(tmp_path: Path) -> None:
    values = json.loads(state_text())
    del values["buffer"]["drawn_now"]
    (tmp_path / "driver.json").write_text(json.dumps(values))
    assert DriverState.read(tmp_path) == driver_state(1)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="missing"),
        pytest.param("{", id="no-json"),
        pytest.param("[1]", id="list"),
        pytest.param('{"version": 1}', id="field-missing"),
        pytest.param('{"version": 1, "cursor": 2, "rate": [1.0, 2.0]}', id="of-an-older-program"),
        pytest.param(state_text(version="one"), id="version-text"),
        pytest.param(state_text(rate=3), id="rate-number"),
        pytest.param(state_text(rate=[2.0, 1.0]), id="rate-above-one"),
        pytest.param(state_text(retry=[-1]), id="draw-negative"),
        pytest.param(state_text(retry="12"), id="retry-text"),
        pytest.param(state_text(drawn_now=-1), id="count-negative"),
        pytest.param(state_text(other=1), id="field-unknown"),
    ],
)
def test_a_driver_state_that_is_none(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "driver.json").write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/driver.json is no state of the driver"):
        DriverState.read(tmp_path)


def test_a_driver_state_that_cannot_be_read_is_no_reason_to_remove_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver_state(1).write(tmp_path)
    read_text, failures = Path.read_text, [OSError(errno.EIO, "of the disk", "driver.json")] * 3

    def failing(path: Path, **how: Any) -> str:
        if failures:
            raise failures.pop()
        return read_text(path, **how)

    monkeypatch.setattr(durable, "WAIT_S", 0.0)
    monkeypatch.setattr(Path, "read_text", failing)
    assert DriverState.read(tmp_path) == driver_state(1)
    failures += [OSError(errno.EIO, "of the disk", "driver.json")] * 4
    with pytest.raises(OSError, match="of the disk: 'driver.json'"):
        DriverState.read(tmp_path)
