"""Checkpoints: which one counts, which ones are kept, and the state of the driver in them."""

import json
from pathlib import Path

import pytest

from dapo.sampling.draws import BufferState
from dapo.state.checkpoint import CheckpointStore, step_of
from dapo.state.driver_state import DriverState
from tests.support.state.claims import names, write

STATE = DriverState(
    version=1, buffer=BufferState(retry=[10, 11], rate=[1.5, 2.0], draws={"trained": 8}, tokens={"trained": 40})
)


def save(store: CheckpointStore, step: int, text: str = "weights") -> None:
    write(store, step, {"actor/rank0.bin": f"{text} of step {step}", "driver.json": "{}"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_what_is_written_is_what_is_read(root):
    assert CheckpointStore(root, keep=0).latest() is None
    save(CheckpointStore(root, keep=0), 5)
    save(CheckpointStore(root, keep=0), 10)
    found = CheckpointStore(root, keep=0).latest()
    assert found == root / "step_000010" and step_of(found) == 10
    assert (found / "actor" / "rank0.bin").read_text() == "weights of step 10"
    assert (root / "LATEST").read_text() == "step_000010\n"
    manifest = json.loads((found / "manifest.json").read_text())
    assert manifest["files"].keys() == {"actor/rank0.bin", "driver.json"}
    assert manifest["files"]["actor/rank0.bin"]["bytes"] == len("weights of step 10")


@pytest.mark.parametrize(
    ("keep", "steps", "left"),
    [
        pytest.param(0, [1, 2, 3, 4], [1, 2, 3, 4], id="all"),
        pytest.param(1, [1, 2, 3, 4], [4], id="one"),
        pytest.param(3, [1, 2, 3, 4], [2, 3, 4], id="three"),
    ],
)
def test_the_newest_are_kept(keep, steps, left, root):
    for step in steps:
        save(CheckpointStore(root, keep=keep), step)
    assert names(root) == ["LATEST", *(f"step_{step:06d}" for step in left)]


def test_later_ones_than_what_is_written_are_set_aside(root):
    """Of a course that was left, or of a disk that was not there when this one began."""
    for step in (5, 10, 6):
        save(CheckpointStore(root, keep=1), step)
    assert names(root) == ["LATEST", "left_000010", "step_000006"]
    assert CheckpointStore(root, keep=1).latest() == root / "step_000006"
    assert (root / "left_000010" / "actor" / "rank0.bin").read_text() == "weights of step 10"


def test_no_whole_checkpoint_is_an_error_and_not_a_new_start(root):
    store = CheckpointStore(root, keep=3)
    broken = [root / "step_000005" / "driver.json", root / "step_000006" / "manifest.json"]
    save(store, 5)
    save(store, 6)
    for path in broken:
        path.unlink()
    with pytest.raises(ValueError, match="no checkpoint under .* is whole.*give another `trainer.output_dir`") as error:
        store.latest()
    assert all(str(path) in str(error.value) for path in broken)


@pytest.mark.parametrize("latest", ["step_000005", None])
def test_the_newest_whole_one_counts_whatever_latest_says(latest, root):
    """A crash between the rename and the writing of LATEST must not lose a step."""
    store = CheckpointStore(root, keep=3)
    save(store, 5)
    save(store, 10)
    (root / "LATEST").unlink()
    if latest is not None:
        (root / "LATEST").write_text(latest)
    assert store.latest() == root / "step_000010"
    store.leave_later()
    assert (root / "LATEST").read_text() == "step_000010\n"
    save(store, 11)
    assert (root / "LATEST").read_text() == "step_000011\n"


def test_a_course_that_was_left_is_set_aside_and_cannot_return(root):
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


def test_a_run_that_may_not_write_any_more_replaces_nothing(root):
    checks = iter([None, RuntimeError("taken over")])  # before it writes, and before it commits

    def guard() -> None:
        if error := next(checks):
            raise error

    save(CheckpointStore(root, keep=0), 1)
    with pytest.raises(RuntimeError, match="taken over"):
        save(CheckpointStore(root, keep=0, guard=guard), 1, "other weights")
    assert names(root) == ["LATEST", "step_000001"]
    assert (root / "step_000001" / "actor" / "rank0.bin").read_text() == "weights of step 1"


def test_a_driver_state_is_read_again_also_one_of_an_older_program(tmp_path):
    STATE.write(tmp_path)
    assert DriverState.read(tmp_path) == STATE
    values = json.loads((tmp_path / "driver.json").read_text())
    del values["buffer"]["drawn_now"]
    (tmp_path / "driver.json").write_text(json.dumps(values))
    assert DriverState.read(tmp_path) == STATE
