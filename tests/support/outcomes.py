"""What must be the same of a small run whatever dies or breaks in it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.support.runs import checkpoint, metrics, samples

STEPS = 3
RUN = (
    *(f"trainer.total_steps={STEPS}", "checkpoint.every=1", "eval.every=0", "eval.before_train=false"),
    *("eval.after_train=false", "actor.num_workers=2", "actor.timeout_s=60"),
)
IDENTITY = ("in_generation", "in_reward", "buffered", "to_retry", "trained", "all_correct", "all_wrong", "unscorable")


def outcome(output_dir: Path) -> tuple[str, list[dict[str, Any]]]:
    """What must not depend on faults: the trained weights and what was sampled, and the metrics without times."""
    weights = checkpoint(output_dir) / "hf" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest() + samples(output_dir), metrics(output_dir)


def last_line(output_dir: Path) -> dict[str, Any]:
    """The newest metrics, with times."""
    line: dict[str, Any] = json.loads((output_dir / "metrics.jsonl").read_text().splitlines()[-1])
    return line


def assert_all_draws_are_accounted_for(output_dir: Path) -> None:
    """Each draw is in one state, in every line of a step's metrics."""
    lines = list(map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines()))
    assert any("ledger/drawn" in line for line in lines)
    for line in lines:
        if "ledger/drawn" not in line:
            assert "eval/accuracy" in line, "lines of their own are those of evaluations"
            continue
        draws = sum(line[f"ledger/draws_{name}"] for name in (*IDENTITY, "overlong"))
        assert draws == line["ledger/drawn"]
