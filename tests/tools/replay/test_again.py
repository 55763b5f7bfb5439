"""Real steps taken again: equal to the bit, at staleness 1; and runs of one half."""

import subprocess
import sys
from pathlib import Path

import pytest

from dapo.config.compose import compose
from dapo.state.batches import steps_kept
from dapo.tools.replay.again import prepare
from dapo.tools.replay.outcome import outcome
from tests.support.cluster import join_cluster
from tests.support.runs import SMALL, START_S, TINY, Runs, metrics, run_program

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]

STEPS = 4
STALE = (f"trainer.total_steps={STEPS}", "filter_groups.max_staleness=1", "checkpoint.batches=3")


@pytest.fixture(scope="module")
def run(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps at staleness 1 with a reference policy, saved after the second and the last."""
    return runs.small(tmp_path_factory.mktemp("replay") / "run", *STALE)


@pytest.mark.nightly
def test_a_step_comes_out_equal_to_the_bit_by_way_of_the_one_before_it(run: Path) -> None:
    """The command is the one that a person types."""
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    assert steps_kept(run / "batches") == [2, 3, 4], "as many as `checkpoint.batches`"
    address = join_cluster()
    line = [sys.executable, "-m", "dapo.replay", str(run), "--step", str(STEPS), address]
    done = subprocess.run(line, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
    assert f"step 4 from {run / 'checkpoints' / 'step_000002'}, by way of steps 3 to 3" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"step {STEPS} again: ")
    found = outcome(run, run / "replays" / "step_000004", STEPS)
    assert found.same and found.weights and len(found.metrics) > 30
    assert found.metrics["batch/stale_tokens"][0] > 0, "at staleness 1"
    assert {path: path.stat().st_mtime_ns for path in before} == before, "the run is only read"


@pytest.mark.nightly
def test_what_another_setting_would_have_made_of_a_step(run: Path, runs: Runs, tmp_path: Path) -> None:
    given = prepare(run, 3, tmp_path / "other", ["actor.optim.lr=1e-5", "algorithm.clip_ratio_high=0.21"])
    assert given.cfg.checkpoint.accept_changes[2:] == ["algorithm.clip_ratio_high"]
    runs.train(given.cfg, until=given.step)
    found = outcome(run, given.folder, 3)
    assert not found.same and "actor/lr" in found.differing
    assert "batch/reward_mean" in found.metrics and "batch/reward_mean" not in found.differing
    assert found.weights is None, "the run kept no model of step 3"


@pytest.mark.nightly
def test_one_half_generates_and_the_other_trains_on_it(runs: Runs, tmp_path: Path) -> None:
    """The second trains on tokens of the first policy, with as many updates in between as there were batches."""
    address = join_cluster()
    out = run_program(tmp_path / "rollout", "none", "--rollout-only", "trainer.total_steps=2", address)
    assert "step 2/2" in out and "eval" not in out
    batches = tmp_path / "rollout" / "batches"
    assert steps_kept(batches) == [1, 2]
    lines = metrics(tmp_path / "rollout")
    assert [line["step"] for line in lines] == [1, 2] and not any("actor/loss" in line for line in lines)
    assert [line["batch/staleness_mean"] for line in lines] == [0, 1]
    where = [f"trainer.output_dir={tmp_path / 'train'}", "trainer.total_steps=9"]
    runs.train(compose([*SMALL, f"--train-only={batches}", *where], TINY))
    trained = metrics(tmp_path / "train")
    assert [line["step"] for line in trained] == [1, 2], "as many as there are batches"
    for line, other in zip(trained, lines, strict=True):
        assert line["actor/grad_norm"] > 0 and line["actor/skipped_steps"] == 0
        for name in ("batch/tokens_per_group_max", "batch/staleness_max"):
            assert line[name] == other[name]
        # The policy that generated is its own reference; the actors', computed apart, is 1e-8 away from it.
        assert line["batch/advantage_std"] == pytest.approx(other["batch/advantage_std"], rel=1e-6)
    assert trained[0]["parity/max_abs_logprob_diff"] <= 1e-4
