"""DAPO teaches a tool: in the experiment `tool_tiny` held-out accuracy comes from calls of the calculator."""

from pathlib import Path

import pytest

from dapo.config.compose import compose
from dapo.report.log import read_metrics
from tests.support.report.reference import undocumented
from tests.support.runs import Runs

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(3600)]

TOOL = "tool_tiny"


@pytest.mark.long
def test_a_model_learns_to_call_the_calculator(runs: Runs, tmp_path: Path) -> None:
    """The reward is for the right answer alone."""
    run = runs.train(compose([f"trainer.output_dir={tmp_path / 'run'}"], TOOL))
    lines = read_metrics(run / "metrics.jsonl")
    assert undocumented(name for line in lines for name in line) == []
    before, *_, after = (line for line in lines if "eval/accuracy" in line)
    assert before["eval/accuracy"] <= 0.3 and after["eval/accuracy"] >= 0.7
    assert before["eval/turns_mean"] <= 1.6 and after["eval/turns_mean"] >= 1.9


def test_a_short_run(runs: Runs, tmp_path: Path) -> None:
    small = ("rollout.n=4", "data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "actor.num_workers=1")
    no_eval = ("eval.every=0", "eval.before_train=false", "eval.after_train=false", "data.val_files=[]")
    given = [*small, *no_eval, "trainer.total_steps=1", f"trainer.output_dir={tmp_path / 'run'}"]
    [line] = read_metrics(runs.train(compose(given, TOOL)) / "metrics.jsonl")
    assert 1 < line["rollout/turns_mean"] < 2 and 0 < line["rollout/accuracy"] < 1
    assert line["actor/grad_norm"] > 0 and line["parity/mean_abs_logprob_diff"] < 1e-4
