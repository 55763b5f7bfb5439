"""The real program at staleness 1: generation goes on during updates, and a stopped run continues from what it held.

One run in two program starts: SIGTERM stops it in the middle, the same command takes it to its end.
"""

import json
import math
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dapo.algorithm.fate import TRAINED
from dapo.config.paths import resolve_path
from dapo.report.log import read_metrics
from dapo.sampling.draws import DROPPED, LOST, BufferState
from dapo.state.driver_state import DriverState
from dapo.state.groups import FILE
from dapo.tiny.random_model import make_random_model
from tests.support.runs import START_S, checkpoint, command, finish, start_program

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1500)]

TOTAL, STOP_AT, BATCH = 8, 4, 4
OVERLAP = (
    *("filter_groups.max_staleness=1", f"trainer.total_steps={TOTAL}", "eval.before_train=false"),
    *(f"eval.every={STOP_AT}", "checkpoint.every=3"),
    # Long-tailed responses, a slow engine and a short update: some are under way whenever the weights change. And
    # nearly every group is usable, so that of the draws that start while the rate is unknown most are too old when
    # their turn comes.
    "rollout.vllm.max_num_seqs=4",
    *("data.max_response_length=512", "actor.max_tokens_per_gpu=1024", "actor.ppo_epochs=1"),
    *("actor.ppo_mini_batch_size=4", "algorithm.kl.reward_coeff=0"),
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1 if len(solution_str) % 2 else -1
"""


@dataclass(frozen=True)
class Saved:
    """The buffer's part of a checkpoint. rows: of the groups that it held, one per response."""

    name: str
    version: int
    buffer: BufferState
    rows: list[dict]

    @classmethod
    def of(cls, directory: Path) -> "Saved":
        state = DriverState.read(directory)
        rows = pq.read_table(directory / FILE).to_pylist()
        for row in rows:
            row |= {name: json.loads(row[name]) for name in ("policy_versions", "score")}
        return cls(directory.name, state.version, state.buffer, rows)

    @property
    def cursor(self) -> int:
        """Every draw before it is used up."""
        return min([*self.buffer.retry, *[row["draw"] for row in self.rows]], default=sum(self.buffer.draws.values()))


@dataclass(frozen=True)
class Run:
    steps: list[dict]  # the metrics of each
    stopped: Saved
    returncode: int
    output: str  # of the second start
    ended: Saved


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("overlap")
    output_dir, held_out, reward = folder / "run", folder / "held_out.parquet", folder / "reward.py"
    pq.write_table(pq.read_table(resolve_path("pkg://dapo.tiny/data/val.parquet")).slice(0, 16), held_out)
    reward.write_text(REWARD)
    model = make_random_model(folder / "model")
    functions = f"reward.functions=[{{path:{reward},name:compute_score}}]"
    turns = ("trainer.device=cpu", "trainer.colocate=none")
    line = command(output_dir, str(held_out), *OVERLAP, f"model.path={model}", functions, *turns)
    # At this line, what was in flight at the weight sync has ended.
    process, children = start_program(line, f"eval · step {STOP_AT} ")
    os.kill(process.pid, signal.SIGTERM)
    returncode, _ = finish(process, children)
    stopped = Saved.of(checkpoint(output_dir))
    second = subprocess.run(line, capture_output=True, text=True, timeout=START_S)
    assert second.returncode == 0, second.stderr
    lines = read_metrics(output_dir / "metrics.jsonl")
    assert {STOP_AT, TOTAL} <= {each["step"] for each in lines if "eval/accuracy" in each}
    steps = [each for each in lines if "actor/loss" in each]
    return Run(steps, stopped, returncode, second.stdout, Saved.of(checkpoint(output_dir)))


def test_a_run_stopped_in_the_middle_ends_and_trains_on_tokens_of_the_policy_before_and_none_older(run):
    assert run.returncode == 85 and STOP_AT <= run.stopped.version < TOTAL == run.ended.version
    assert "resuming from" in run.output and run.stopped.name in run.output
    # The step that the signal met in its update is saved and has no line.
    assert {line["step"] for line in run.steps} | {run.stopped.version} == set(range(1, TOTAL + 1))
    assert max(line["batch/staleness_max"] for line in run.steps) == 1
    assert run.steps[0]["batch/stale_tokens"] == 0, "at version 0 there is nothing older"
    assert not any("parity/staleness_2/ess" in line for line in run.steps)


def test_current_tokens_have_the_actors_logprobs_and_stale_ones_have_not(run):
    """Also within one response, whose keys and values were recomputed when the weights changed in flight."""
    both = 0
    for line in run.steps:
        fresh, stale = (line.get(f"parity/staleness_{age}/max_abs_logprob_diff") for age in (0, 1))
        share = line["batch/stale_tokens"]
        assert (fresh is not None, stale is not None) == (0 < share < 1, share > 0)
        if share < 1:
            assert (line["parity/max_abs_logprob_diff"] if fresh is None else fresh) <= 1e-4
        if stale is not None:
            assert 1e-4 < stale < 5
        both += fresh is not None
    assert both > 0


def test_a_checkpoint_has_every_draw_and_token_once(run):
    for saved in (run.stopped, run.ended):
        draws, tokens = saved.buffer.draws, saved.buffer.tokens
        held = {row["draw"] for row in saved.rows}
        assert draws[TRAINED] == BATCH * saved.version
        # In draw order all draws before the cursor have ended: one trained or dropped twice would be one too many.
        assert sum(draws.values()) == saved.cursor
        waiting = held | set(saved.buffer.retry)
        assert waiting == set(range(saved.cursor, saved.cursor + len(held) + len(saved.buffer.retry)))
        assert len(saved.rows) == 4 * len(held)
        assert set(tokens) <= {TRAINED, *DROPPED, *LOST} and set(draws) <= {TRAINED, *DROPPED}
        assert all(saved.version - 1 <= row["started"] <= saved.version for row in saved.rows)


def test_the_continued_run_trains_on_the_groups_that_the_stop_had_saved(run):
    """Its first step can have old tokens from them alone: whatever it generates is of the version that it loads."""
    stopped = run.stopped
    first = next(line for line in run.steps if line["step"] == stopped.version + 1)
    used = range(stopped.cursor, stopped.cursor + int(first["buffer/drawn"]))
    verdicts: dict[int, set[float]] = {}
    stale: dict[int, int] = {}
    for row in stopped.rows:
        verdicts.setdefault(row["draw"], set()).add(row["score"]["accuracy"])
        old = [span["end"] - span["start"] for span in row["policy_versions"] if span["version"] < stopped.version]
        stale[row["draw"]] = stale.get(row["draw"], 0) + sum(old)
    expected = sum(stale[draw] for draw, found in verdicts.items() if draw in used and len(found) == 2)
    assert math.isclose(first["batch/stale_tokens"] * first["buffer/trained_tokens"], expected)
