"""DAPO learns: forty steps of the tiny experiment, with half its responses, lift held-out accuracy beyond noise."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

STEPS = 40


def test_forty_steps_lift_held_out_accuracy(tmp_path):
    """512 problems x 4 samples before and after: the standard error of each is about 0.011, so 0.15 is no accident."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dapo.main_ppo", "+experiment=dapo_tiny", f"trainer.output_dir={tmp_path / 'run'}"),
            *("rollout.n=8", f"trainer.total_steps={STEPS}", "eval.every=0", "checkpoint.every=0"),
        ],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = (line["eval/accuracy"] for line in lines if "eval/accuracy" in line)
    assert before <= 0.5
    assert after >= before + 0.15
    steps = [line for line in lines if "actor/loss" in line]
    assert len(steps) == STEPS
    assert max(line["parity/mean_abs_logprob_diff"] for line in steps) <= 1e-4
    assert max(line["actor/skipped_steps"] for line in steps) == 0
