"""DAPO learns: twenty steps of the tiny experiment, with half its responses, lift held-out accuracy beyond noise."""

from pathlib import Path

import pytest

from dapo.config.compose import compose
from dapo.report.log import read_metrics
from tests.support.report.reference import undocumented
from tests.support.runs import TINY, Runs

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]

STEPS = 20


def assert_learns(runs: Runs, folder: Path, *overrides: str) -> None:
    """512 problems x 4 samples before and after: the standard error of each is about 0.011, so 0.15 is no accident."""
    given = ["rollout.n=8", f"trainer.total_steps={STEPS}", "eval.every=0", "checkpoint.every=0", *overrides]
    run = runs.train(compose([*given, f"trainer.output_dir={folder}"], TINY))
    lines = read_metrics(run / "metrics.jsonl")
    assert undocumented(name for line in lines for name in line) == []
    before, after = (line["eval/accuracy"] for line in lines if "eval/accuracy" in line)
    assert before <= 0.5
    assert after >= before + 0.15
    steps = [line for line in lines if "actor/loss" in line]
    assert len(steps) == STEPS
    assert max(line["parity/mean_abs_logprob_diff"] for line in steps) <= 1e-4
    assert max(line["actor/skipped_steps"] for line in steps) == 0


def test_twenty_steps_lift_held_out_accuracy(runs: Runs, tmp_path: Path) -> None:
    assert_learns(runs, tmp_path)
