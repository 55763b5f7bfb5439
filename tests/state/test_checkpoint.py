"""Checkpoints are complete or not there: faults of every kind are found, named, and stepped over."""

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from dapo.sampling.draws import BufferState
from dapo.sampling.saved import DriverState
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
    return json.dumps({"version": version, "buffer": asdict(driver_state(1).buffer) | changes})


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


def flip_byte(directory: Path) -> Path:
    path = directory / "actor" / "rank0.bin"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    return path


def truncate(directory: Path) -> Path:
    path = directory / "actor" / "rank0.bin"
    path.write_bytes(path.read_bytes()[:-1])
    return path


def remove_file(directory: Path) -> Path:
    path = directory / "driver.json"
    path.unlink()
    return path


def remove_manifest(directory: Path) -> Path:
    path = directory / "manifest.json"
    path.unlink()
    return path


def cut_manifest(directory: Path) -> Path:
    path = directory / "manifest.json"
    path.write_text(path.read_text()[:40])
    return path


def other_format(directory: Path) -> Path:
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    return path


FAULTS = [
    pytest.param(flip_byte, "sha256 differs", id="byte-flipped"),
    pytest.param(truncate, "has 17 bytes where 18 were written", id="file-truncated"),
    pytest.param(remove_file, "cannot be read", id="file-missing"),
    pytest.param(remove_manifest, "is missing or cannot be read", id="manifest-missing"),
    pytest.param(cut_manifest, "is missing or cannot be read", id="manifest-truncated"),
    pytest.param(other_format, "has format 99, and this dapo reads format 2", id="format-newer"),
]


@pytest.mark.parametrize(("damage", "message"), FAULTS)
def test_a_broken_checkpoint_gives_way_to_the_one_before(
    damage: Callable[[Path], Path], message: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(root, keep=3)
    save(store, 5)
    save(store, 10)
    broken = damage(root / "step_000010")
    with pytest.raises(BrokenCheckpoint, match=message):
        verify(root / "step_000010")
    with caplog.at_level(logging.WARNING):
        assert store.latest() == root / "step_000005"
    assert str(broken) in caplog.text and message in caplog.text
    save(store, 10, "new weights")  # the run comes by the same step again
    assert store.latest() == root / "step_000010"
    assert (root / "step_000010" / "actor" / "rank0.bin").read_text() == "new weights of step 10"


def test_no_whole_checkpoint_is_an_error_and_not_a_new_start(root: Path) -> None:
    store = CheckpointStore(root, keep=3)
    save(store, 5)
    save(store, 6)
    broken = [flip_byte(root / "step_000005"), truncate(root / "step_000006")]
    with pytest.raises(ValueError, match="no checkpoint under .* is whole.*remove that directory") as error:
        store.latest()
    assert all(str(path) in str(error.value) for path in broken)


def test_a_crash_before_the_rename_leaves_the_old_one_and_is_cleared_away(root: Path) -> None:
    store = CheckpointStore(root, keep=3)
    save(store, 5)
    shutil.copytree(root / "step_000005", root / "step_000010.tmp")
    (root / ".LATEST.tmp").write_text("step_0")
    assert store.latest() == root / "step_000005"
    assert "step_000010.tmp" in names(root)  # reading must not disturb a live writer
    save(store, 7)
    assert names(root) == ["LATEST", "step_000005", "step_000007"]


def test_a_crash_between_rename_and_latest_loses_no_step(root: Path) -> None:
    store = CheckpointStore(root, keep=3)
    save(store, 5)
    latest = (root / "LATEST").read_text()
    save(store, 10)
    (root / "LATEST").write_text(latest)
    assert store.latest() == root / "step_000005"  # as committed; step 10 is reached again
    (root / "LATEST").unlink()
    assert store.latest() == root / "step_000010"


@pytest.mark.parametrize("content", ["step_000099", "", "../elsewhere", "rubbish\n"])
def test_latest_pointing_to_nothing(content: str, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(root, keep=3)
    save(store, 5)
    (root / "LATEST").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert store.latest() == root / "step_000005"
    assert "which is not there" in caplog.text


def test_a_course_that_was_left_is_removed(root: Path) -> None:
    """LATEST set back to step 5 by hand: the run goes on from there, and step 10 of the old course must not return."""
    store = CheckpointStore(root, keep=1)
    save(CheckpointStore(root, keep=0), 5)
    save(CheckpointStore(root, keep=0), 10)
    (root / "LATEST").write_text("step_000005\n")
    assert store.latest() == root / "step_000005"
    save(store, 6)
    assert names(root) == ["LATEST", "step_000006"]


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
        pytest.param(state_text(other=1), id="field-unknown"),
    ],
)
def test_a_driver_state_that_is_none(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "driver.json").write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/driver.json is no state of the driver"):
        DriverState.read(tmp_path)
