"""Reads a finished or running run from its files, over all its starts. They are the configuration, `metrics.jsonl`, and
`samples.sqlite` with starts, failed saves and held-out verdicts. Without the latter, these are absent."""

import math
import re
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from dapo.ground.console import warn
from dapo.report.log import METRICS, read_metrics
from dapo.report.store.reader import Reader
from dapo.report.store.schema import DATABASE, UNNAMED
from dapo.state.run_dir import CONFIG, HEADER, read_inputs

ACCURACY = re.compile(r"eval/(?:(.+)/)?accuracy")
LOSSES = {  # texts of the warnings
    "engines": re.compile(r"engine \d+ is lost"),
    "actors": re.compile(r"the actors are lost"),
    "reward_workers": re.compile(r"reward worker \d+ is replaced"),
    "function_workers": re.compile(r"`rollout.function` worker \d+ is replaced"),
    "judges": re.compile(r"judge \d+ is (?:lost|replaced)"),
}
Records = Sequence[Mapping[str, Any]]


class Problem(NamedTuple):
    """A held-out problem. set: "" for the unnamed one. number: in the run's store. text: after the chat template.
    source: its `data_source`."""

    set: str
    number: int
    text: str
    ground_truth: str
    source: str = ""


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
    oldest first; empty, and failed_saves None, if there is no store or it does not cover the whole run (the one before
    it was damaged, or of another version). problems: held-out verdicts of the first and the last evaluation of each
    set, if any. inputs: see `dapo.data.origins`."""

    name: str
    config: Mapping[str, Any]
    records: Records
    starts: tuple[Start, ...] = ()
    failed_saves: int | None = None
    problems: tuple[Problems, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    late_losses: Mapping[str, int] = field(default_factory=dict)

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        found = {record["step"]: record for record in self.records if "perf/step_s" in record}
        return [found[step] for step in sorted(found)]


def read_run(folder: Path, name: str = "") -> Run:
    """Reads the run in `folder`. name: for tables; "": the folder's name. Raises ValueError if there is no run."""
    path = folder / CONFIG
    try:
        text = path.read_text(encoding="utf-8")
        config = OmegaConf.to_container(OmegaConf.create(text)) if text.startswith(HEADER) else None
    except (FileNotFoundError, NotADirectoryError):
        config = None
    except Exception as error:  # whatever a disk or a YAML parser raises
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder} is no run: it holds no {CONFIG} of one; give the `trainer.output_dir` of a run")
    metrics = folder / METRICS
    records = read_metrics(metrics) if metrics.is_file() else []
    whole: dict[str, Any] = {"name": name or folder.absolute().name, "config": config, "records": records}
    whole["inputs"] = read_inputs(folder)
    try:
        with Reader(folder) as store:
            starts = tuple(_start(row) for row in store.starts())
            whole["problems"] = _ends(store, evaluated(records))
            if _has_all(starts, records):
                losses = Counter(map(_lost, store.warnings_after_steps()))
                whole |= {"starts": starts, "failed_saves": store.count("failed_save"), "late_losses": losses}
            return Run(**whole)
    except (ValueError, sqlite3.Error) as error:
        if (folder / DATABASE).is_file():  # damaged, of another version, or where it cannot be read
            warn(f"starts, cost and gains of {folder} are not known: {error}")
        return Run(**whole)


def _lost(warning: str) -> str:
    """Returns which loss a warning reports, as in `perf/restarted_NAME`; empty if none."""
    return next((name for name, words in LOSSES.items() if words.match(warning)), "")


def _has_all(starts: Sequence[Start], records: Records) -> bool:
    """Whether these starts include the first step of the records."""
    first = min((record["step"] for record in records if "perf/step_s" in record), default=math.inf)
    return first >= min((step for start in starts for step in start.steps), default=math.inf)


def _start(row: dict[str, Any]) -> Start:
    steps, ended = frozenset(row["steps"]), row["ended"] is not None
    return Start(steps=steps, seconds=row["last"] - row["began"], ended=ended, gpus=row["gpus"])


def evaluated(records: Records) -> dict[str, list[int]]:
    """Returns the evaluated steps in order, by the name of the accuracy in `eval/`; "" for the overall one."""
    found: dict[str, set[int]] = {}
    for record in records:
        for name in record:
            if (match := ACCURACY.fullmatch(name)) and known(record, name) is not None:
                found.setdefault(match[1] or "", set()).add(record["step"])
    return {name: sorted(steps) for name, steps in found.items()}


def _ends(store: Reader, steps: Mapping[str, Sequence[int]]) -> tuple[Problems, ...]:
    """Returns the verdicts of each set's first and last evaluation, or of the only one. steps: from `evaluated`."""
    count = len({step for each in steps.values() for step in each})
    found = []
    for end in (0, -1)[:count]:
        of_set = {name: each[end] for name, each in steps.items()}
        at = {step: _problems(store, step) for step in sorted({*of_set.values()})}
        found.append({key: one[key] for step, one in at.items() for key in one if of_set.get(key.set) == step})
    return tuple(found)


def _problems(store: Reader, step: int) -> Problems:
    return {
        Problem("" if set == UNNAMED else set, number, text, truth, source): accuracy
        for set, number, text, truth, source, accuracy in map(dict.values, store.held_out(step))
    }


def labels(folders: Sequence[Path]) -> list[str]:
    """Returns a unique name for each run: its folder's, with its parent's if ambiguous, or the whole path."""
    names = [folder.absolute().name for folder in folders]
    found: list[str] = []
    for folder, name in zip(folders, names, strict=True):
        label = name if names.count(name) == 1 else f"{folder.absolute().parent.name}/{name}"
        found.append(label if label not in found else str(folder.absolute()))
    return found


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
