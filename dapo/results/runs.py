"""Reads a finished or running run from its files, over all its starts. They are the configuration, `metrics.jsonl`, and
`samples.sqlite` with starts, failed saves and held-out verdicts. Without the latter, these are absent."""

import math
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import OmegaConf

from dapo.ground.console import warn
from dapo.report.log import METRICS, read_metrics
from dapo.report.store.reader import Reader
from dapo.report.store.schema import DATABASE, UNNAMED
from dapo.state.run_dir import CONFIG, HEADER, read_inputs

ACCURACY = re.compile(r"eval/(?:(.+)/)?accuracy")  # of a set, or of one of its data sources
Records = Sequence[Mapping[str, Any]]


class Problem(NamedTuple):
    """A held-out problem. set: "" for the unnamed one. number: in the run's store. text: after the chat template."""

    set: str
    number: int
    text: str
    ground_truth: str


Problems = Mapping[Problem, float]  # with the mean accuracy of the answers to each


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One start of the program. steps: those that count. seconds: from workers ready to its end or last sign of life.
    ended: in order; False also while it runs."""

    steps: frozenset[int]
    seconds: float
    ended: bool
    gpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Contents of a run's files. Made by `read_run`, consumed by `results`. records: lines of metrics.jsonl. starts:
    oldest first; empty, and failed_saves None, without a store. problems: held-out verdicts of the first and the last
    evaluation, if any. inputs: see `dapo.data.origins`."""

    name: str
    config: Mapping[str, Any]
    records: Records
    starts: tuple[Start, ...] = ()
    failed_saves: int | None = None
    problems: tuple[Problems, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        found = {record["step"]: record for record in self.records if "perf/step_s" in record}
        return [found[step] for step in sorted(found)]


def read_run(folder: Path, name: str = "") -> Run:
    """Reads the run in `folder`. name: for tables; "": the folder's name. Raises ValueError if there is no run."""
    path = folder / CONFIG
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not text.startswith(HEADER):
        raise ValueError(f"{folder} is no run: it holds no {CONFIG} of one; give the `trainer.output_dir` of a run")
    metrics = folder / METRICS
    records = read_metrics(metrics) if metrics.is_file() else []
    run = Run(
        name=name or folder.absolute().name,
        config=cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(text))),
        records=records,
        inputs=read_inputs(folder),
    )
    try:
        with Reader(folder) as store:
            return replace(
                run,
                starts=tuple(_start(row) for row in store.starts()),
                failed_saves=store.count("failed_save"),
                problems=_ends(store, records),
            )
    except (ValueError, sqlite3.Error) as error:
        if (folder / DATABASE).is_file():  # damaged, or of another version
            warn(f"starts, cost and gains of {folder} are not known: {error}")
        return run


def _start(row: dict[str, Any]) -> Start:
    steps, ended = frozenset(row["steps"]), row["ended"] is not None
    return Start(steps=steps, seconds=row["last"] - row["began"], ended=ended, gpus=row["gpus"])


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads runs; each has the name of its folder, with its parent's if several have it."""
    names = [folder.absolute().name for folder in folders]
    return [
        read_run(folder, name if names.count(name) == 1 else f"{folder.absolute().parent.name}/{name}")
        for folder, name in zip(folders, names, strict=True)
    ]


def _ends(store: Reader, records: Records) -> tuple[Problems, ...]:
    """Returns the verdicts of the first and of the last evaluation, or of the only one."""
    steps = sorted({record["step"] for record in records if any(map(ACCURACY.fullmatch, record))})
    return tuple(_problems(store, step) for step in dict.fromkeys((*steps[:1], *steps[-1:])))


def _problems(store: Reader, step: int) -> Problems:
    return {
        Problem("" if set == UNNAMED else set, number, text, truth): accuracy
        for set, number, text, truth, _, accuracy in map(dict.values, store.held_out(step))
    }


def positions(records: Records, against: str) -> dict[int, float]:
    """Returns the position of each step on an axis: `step`, or the `tokens` generated or `seconds` of steps so far."""
    if against == "step":
        return {record["step"]: float(record["step"]) for record in records}
    found, total = {0: 0.0}, 0.0
    for record in sorted(records, key=lambda one: one["step"]):
        if against == "seconds" and "perf/step_s" in record:
            total += record["perf/step_s"]
            found[record["step"]] = total
        elif against == "tokens" and "ledger/tokens_generated" in record:
            found[record["step"]] = record["ledger/tokens_generated"]
    return found


def known(record: Mapping[str, Any], name: str) -> float | None:
    """Returns a number of a line; None if it is absent or NaN."""
    value = float(record.get(name, math.nan))
    return None if math.isnan(value) else value
