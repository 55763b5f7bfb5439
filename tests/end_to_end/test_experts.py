"""Real runs of a mixture of experts: engines sample from the ranks' experts, exports have the names of the files."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dapo.config.paths import resolve_path
from tests.end_to_end.test_learning import assert_learns
from tests.support.runs import Runs, checkpoint, metrics
from tests.support.training.upcycled import upcycle

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1500)]

BOUND = 1e-4


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the tiny task with four experts for each of its MLPs, of which a token gets two."""
    return upcycle(resolve_path("pkg://dapo.tiny/base"), tmp_path_factory.mktemp("experts"), noise=0.02)


@pytest.mark.parametrize("replay", ["false", "true"])
def test_experts_and_router_are_trained_and_a_run_goes_on(
    runs: Runs, mixture: Path, tmp_path: Path, replay: str
) -> None:
    keys = [f"model.path={mixture}", f"rollout.replay_experts={replay}", "eval.every=0", "checkpoint.batches=true"]
    for steps in (1, 3):
        runs.small(tmp_path, *keys, f"trainer.total_steps={steps}")
    steps = [line for line in metrics(tmp_path) if "actor/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["parity/max_abs_logprob_diff"] <= BOUND for line in steps), "engines pack experts anew"
    files = sorted((tmp_path / "batches").glob("step_*.parquet"))
    assert files
    for file in files:
        rows = pq.read_table(file, columns=["token_ids", "experts"]).to_pylist()
        assert all((len(row["experts"]) > 4 * 2 * len(row["token_ids"])) == (replay == "true") for row in rows)
    before, after = (load_file(at / "model.safetensors") for at in (mixture, checkpoint(tmp_path) / "hf"))
    assert after.keys() == before.keys()
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert not [name for name in still if ".experts." in name or ".gate.weight" in name], still
    AutoModelForCausalLM.from_pretrained(checkpoint(tmp_path) / "hf")


@pytest.mark.long
def test_twenty_steps_lift_held_out_accuracy(runs: Runs, mixture: Path, tmp_path: Path) -> None:
    assert_learns(runs, tmp_path, f"model.path={mixture}")
