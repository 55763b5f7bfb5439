"""Real runs over data that gives few usable groups or none: the budget, its message, what is left on disk."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from dapo.config.paths import resolve_path
from dapo.report.log import read_metrics
from dapo.state.checkpoint import verify
from dapo.state.driver_state import DriverState
from dapo.state.groups import FILE
from tests.support.runs import Runs, checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]

BUDGET, N = 16, 4
FEW = ("data.gen_batch_size=8", "actor.num_workers=1", "filter_groups.max_num_gen_batches=2", "eval.before_train=false")
REWARD = """
from itertools import count

turn = count()

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    {}
"""


def overrides(tmp_path: Path, verdict: str) -> tuple[str, ...]:
    """A reward function of its own, whose body is `verdict`, and a small budget."""
    (tmp_path / "reward.py").write_text(REWARD.format(verdict))
    return (*FEW, f"reward.functions=[{{path:{tmp_path}/reward.py,name:compute_score}}]")


def test_ends_within_the_budget_with_a_message_and_a_checkpoint(runs: Runs, tmp_path):
    with pytest.raises(RuntimeError) as ended:
        runs.small(tmp_path / "run", *overrides(tmp_path, "return -1"))
    message = str(ended.value)
    assert message.startswith(f"{BUDGET} draws for one update, and 0 of the 4 usable groups that it needs")
    for part in ("all wrong 100%", "0: 16, 0..0.25: 0", "easier prompts", "`filter_groups.on_budget="):
        assert part in message
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == [], "nothing was trained"
    saved = checkpoint(tmp_path / "run")
    verify(saved)
    assert saved.name == "step_000000"
    buffer = DriverState.read(saved).buffer
    assert (buffer.draws, buffer.retry) == ({}, []), "every draw is held"
    assert sorted(pq.read_table(saved / FILE)["draw"].to_pylist()) == [i for i in range(BUDGET) for _ in range(N)]


@pytest.mark.nightly
def test_a_partial_batch_is_trained_on_where_asked_for(runs: Runs, tmp_path):
    """Eight prompts, of which one is mixed: each budget passes through two epochs and finds it twice."""
    rows = pq.read_table(resolve_path("pkg://dapo.tiny/data/train.parquet")).slice(0, 8)
    pq.write_table(rows, tmp_path / "train.parquet")
    truths = [row["ground_truth"] for row in rows["reward_model"].to_pylist()]
    assert len(set(truths)) == 8
    runs.small(
        tmp_path / "run",
        *overrides(tmp_path, f"return 1 if ground_truth == {truths[3]!r} and next(turn) % 2 else -1"),
        f"data.train_files=[{tmp_path / 'train.parquet'}]",
        *("filter_groups.on_budget=train_partial", "trainer.total_steps=2"),
    )
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert (line["buffer/drawn"], line["buffer/trained"], line["buffer/all_wrong"]) == (BUDGET, 2, BUDGET - 2)
        assert line["ledger/drawn"] == BUDGET * line["step"] and line["ledger/draws_trained"] == 2 * line["step"]
        assert line["actor/optimizer_steps"] == 2, "two epochs of one mini-batch"
        assert line["actor/grad_norm"] > 1e-3
    base = load_file(Path(resolve_path("pkg://dapo.tiny/base")) / "model.safetensors")
    trained = load_file(checkpoint(tmp_path / "run") / "hf" / "model.safetensors")
    assert all(not torch.equal(trained[name].float(), base[name].float()) for name in trained)
