"""Made-up runs of the ablation ladder, and the cells of its table."""

import json
from pathlib import Path
from typing import Any

import yaml

from dapo.ablation.results import run_folder


def write_run(
    out: Path,
    rung: str,
    seed: int,
    accuracies: list[float | None],
    total_steps: int | None = None,
    entropy: float = 0.5,
) -> None:
    """A run with one step per accuracy after the first, which is that of the base model. entropy: of the first step."""
    folder = run_folder(out, rung, seed)
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": accuracies[0]}]
    for step, accuracy in enumerate(accuracies[1:], 1):
        tokens = {"buffer/trained_tokens": 1e6, "buffer/dropped_tokens": 4e5, "perf/aborted_tokens": 1e5}
        groups = {"buffer/drawn": 10, "buffer/all_correct": step, "buffer/all_wrong": 3}
        rollout = {"rollout/truncated": 0.2 / step, "rollout/response_length_mean": 30.0 + step}
        actor = {"actor/optimizer_steps": 4.0, "actor/entropy": entropy / step, "actor/clip_fraction": 0.01}
        actor |= {"actor/grad_norm": 0.5 * step}
        records.append({"step": step, **tokens, **groups, **rollout, **actor, "perf/step_s": 1.5})
        records.append({"step": step, "eval/accuracy": accuracy})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    steps = len(accuracies) - 1 if total_steps is None else total_steps
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": {"total_steps": steps}}))


def cells(text: str) -> list[list[str]]:
    """The rows of the first table below its head."""
    lines = text.split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
