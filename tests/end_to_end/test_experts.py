"""Real runs of a mixture of experts: engines sample from the ranks' experts, exports have the names of the files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dapo.config.compose import compose
from dapo.config.paths import resolve_path
from dapo.report.log import read_metrics
from tests.support.outcomes import outcome
from tests.support.runs import SMALL, TINY, Runs, checkpoint, metrics
from tests.support.training.upcycled import upcycle

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]

BOUND = 1e-4
COURSE = ("trainer.total_steps=3", "eval.every=0", "checkpoint.every=1")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the tiny task with four experts for each of its MLPs, of which a token gets two."""
    return upcycle(resolve_path("pkg://dapo.tiny/base"), tmp_path_factory.mktemp("experts"), noise=0.02)


def test_a_run_in_parts_is_the_whole_run_and_trains_experts_and_router(
    runs: Runs, mixture: Path, tmp_path: Path
) -> None:
    overrides = (f"model.path={mixture}", *COURSE)
    whole = runs.small(tmp_path / "whole", *overrides)
    given = compose([*SMALL, f"trainer.output_dir={tmp_path / 'parts'}", "data.val_files=[]", *overrides], TINY)
    for until in (1, 3):
        runs.train(given, until=until)
    assert outcome(tmp_path / "parts") == outcome(whole)

    steps = [line for line in metrics(whole) if "actor/loss" in line]
    assert len(steps) == 3
    assert all(line["parity/max_abs_logprob_diff"] <= BOUND for line in steps), "engines pack experts anew"
    before, after = load_file(mixture / "model.safetensors"), load_file(checkpoint(whole) / "hf" / "model.safetensors")
    assert after.keys() == before.keys()
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert not [name for name in still if ".experts." in name or ".gate.weight" in name], still
    AutoModelForCausalLM.from_pretrained(checkpoint(whole) / "hf")


@pytest.mark.long
def test_twenty_steps_lift_held_out_accuracy(runs: Runs, mixture: Path, tmp_path: Path) -> None:
    """The same as `test_learning` asks of the dense model."""
    overrides = ["rollout.n=8", "trainer.total_steps=20", "eval.every=0", "checkpoint.every=0", f"model.path={mixture}"]
    lines = read_metrics(runs.train(compose([*overrides, f"trainer.output_dir={tmp_path}"], TINY)) / "metrics.jsonl")
    before, after = (line["eval/accuracy"] for line in lines if "eval/accuracy" in line)
    print(f"held-out accuracy {before:.3f} -> {after:.3f}")
    assert before <= 0.5 and after >= before + 0.15
    assert max(line["parity/max_abs_logprob_diff"] for line in lines if "actor/loss" in line) <= BOUND
