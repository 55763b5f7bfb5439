"""Run directories as a run leaves them, made without one."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dapo.config.compose import compose
from dapo.config.schema import LoggingConfig
from dapo.report.store.samples import SampleStore
from dapo.state.run_dir import HEADER
from dapo.types import Group
from tests.support.fakes import make_group
from tests.support.store.stored import collected_of

BEGAN = 1_000_000.0  # Unix time of the first start


def step_line(step: int, accuracy: float, **others: float) -> dict[str, Any]:
    """Of a step of 10 s, 6 of them generation, and of 100 tokens, of which 75 were trained on."""
    return {
        "step": step,
        "rollout/accuracy": accuracy,
        "rollout/response_length_mean": 30.0,
        "actor/entropy": None,
        "buffer/trained_tokens": 75.0,
        "ledger/tokens_generated": 100.0 * step,
        "ledger/goodput": 0.75,
        "perf/step_s": 10.0,
        "perf/generation_s": 6.0,
        **others,
    }


def write_run(folder: Path, records: Sequence[dict[str, Any]], *overrides: str) -> Path:
    """A run of the tiny experiment without a sample store."""
    folder.mkdir(parents=True)
    config = asdict(compose([f"trainer.output_dir={folder}", *overrides], "dapo_tiny"))
    (folder / "config.yaml").write_text(HEADER + OmegaConf.to_yaml(OmegaConf.create(config)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def store_starts(folder: Path, *starts: tuple[Sequence[int], bool, int]) -> SampleStore:
    """Adds a store with starts, each as (its steps, whether it ended in order, GPUs); returns that of the last.

    Start k begins k hours after the first and lasts half an hour, also where it was killed.
    """
    for number, (steps, ended, gpus) in enumerate(starts):
        store = SampleStore(folder, LoggingConfig(), warn=pytest.fail)
        store.begin({}, gpus)
        for step in steps:
            store.step(step, collected_of([make_group(step, [1.0, 0.0])]))
        store.close()
        began = BEGAN + 3600 * number
        with closing(sqlite3.connect(folder / "samples.sqlite")) as connection, connection:
            times = (began, began + 1800 if ended else None, number + 1)
            connection.execute("UPDATE runs SET began = ?, ended = ? WHERE run = ?", times)
            connection.execute("UPDATE steps SET at = ? WHERE run = ?", (began + 1800, number + 1))
    return SampleStore(folder, LoggingConfig(), warn=pytest.fail)


def asked(number: int, text: str, truth: str, *accuracies: float, source: str = "test") -> Group:
    """Answers to the held-out problem in row `number` of its file. source: its data source."""
    group = make_group(number, accuracies)
    prompt = replace(group.draw.prompt, text=text, ground_truth=truth, source=source)
    return replace(group, draw=replace(group.draw, prompt=prompt))
