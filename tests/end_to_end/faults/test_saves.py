"""Whole runs whose checkpoints are written beside the steps, or cannot be written: real ranks, real file systems."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo.ground.fault_points import ONCE, VARIABLE
from dapo.state.saving import SaveFailed
from tests.end_to_end.faults.test_faults import Undisturbed, assert_undisturbed
from tests.support.cluster import join_cluster
from tests.support.outcomes import RUN, STEPS
from tests.support.runs import START_S, Runs, command, metrics

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1500)]

BESIDE = "checkpoint.async_save=true"


def test_a_driver_killed_while_ranks_write_beside_a_step_goes_on_with_the_same_command(
    ray_cluster: None, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """They still write step 2 when step 3 has its batch."""
    line = command(tmp_path / "run", "", *RUN, BESIDE, join_cluster())
    (tmp_path / "once").mkdir()
    env = os.environ | {VARIABLE: "actor.write:sleep@2,driver.collected:kill@3", ONCE: str(tmp_path / "once")}
    killed = subprocess.run(line, capture_output=True, text=True, timeout=START_S, env=env)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert any(name.startswith("step_000002.") for name in left) and "step_000001" in left, left
    again = subprocess.run(line, capture_output=True, text=True, timeout=START_S)
    assert again.returncode == 0, again.stderr
    assert_undisturbed(tmp_path / "run", undisturbed)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with room for a run."""
    root = tmp_path / "disk"
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "none", str(root)], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield root
    subprocess.run(["umount", str(root)], check=True)


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def test_a_run_outlives_a_disk_that_refuses_its_checkpoints_and_goes_on_with_room(
    runs: Runs, undisturbed: Undisturbed, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 2 is not saved, which the run may bear, nor step 3, which ends it: step 1 stays, and nothing else is left.
    The same command with room ends as if nothing had happened."""
    found, checkpoints = disk / "run", disk / "run" / "checkpoints"
    settings = (*RUN, "logging.tensorboard=false", "checkpoint.max_failed_saves=1")
    runs.small(found, *settings, "trainer.total_steps=1")

    def refused(why: str, *overrides: str) -> None:
        capsys.readouterr()
        with pytest.raises(SaveFailed, match=f"step {STEPS} could not be saved in .*{why}"):
            runs.small(found, *settings, *overrides)
        assert "step 2 could not be saved" in (told := capsys.readouterr().err) and "failure 1 of 1" in told
        assert sorted(path.name for path in checkpoints.iterdir()) == ["LATEST", "step_000001"]
        assert [line["step"] for line in metrics(found)] == list(range(1, STEPS + 1)), "steps and metrics go on"

    mount("--bind", checkpoints, checkpoints)
    try:
        mount("-o", "remount,bind,ro", checkpoints)
        refused("Read-only file system")
    finally:
        subprocess.run(["umount", str(checkpoints)], check=True)
    mount("-o", "remount,size=24m", disk)  # for one checkpoint with its export, 15 MB, and not for two
    refused(r"\b1?[0-9] MiB are free", BESIDE)  # torch itself does not say so each time: "unexpected pos 704 vs 598"
    mount("-o", "remount,size=200m", disk)
    runs.small(found, *settings, BESIDE)
    assert_undisturbed(found, undisturbed)
