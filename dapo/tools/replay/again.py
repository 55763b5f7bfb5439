"""Prepares the replay of one step: finds the checkpoint, the batches and the settings."""

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dapo.config.compose import checked_overrides, to_config
from dapo.config.schema import Config
from dapo.report.sinks.choice import OFF
from dapo.report.store.reader import Reader
from dapo.state.batches import BATCHES, steps_kept
from dapo.state.changes import alters_meaning
from dapo.state.checkpoint import CheckpointStore, step_of
from dapo.state.run_dir import CHECKPOINTS, CONFIG, STARTED

REPLAYS = "replays"


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """How to replay a step. Made by `prepare`. run: output directory of the run. step: to reach. first: first step to
    replay on the way. origin: checkpoint to start from; None: the run's initial model. folder: new, empty output
    directory. changed: keys in the overrides."""

    run: Path
    step: int
    first: int
    origin: Path | None
    folder: Path
    cfg: Config
    changed: tuple[str, ...]


def _ranges(steps: Sequence[int]) -> str:
    """Returns steps in order as text: `1 to 3, 7`."""
    starts = [step for step in steps if step - 1 not in steps]
    ends = [step for step in steps if step + 1 not in steps]
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)) or "none"


def prepare(run: Path, step: int, out: Path | None, overrides: Sequence[str]) -> Replay:
    """Finds what a replay needs, and makes its empty directory. out: for the new run; None: `replays/step_NNNNNN` in
    the run's directory, replacing an earlier replay. Raises ValueError if a checkpoint, a batch or the configuration is
    missing, and for overrides as `dapo.config.compose` does."""
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} holds no {CONFIG}; give the `trainer.output_dir` of a run")
    origin = _origin(run, step)
    first = 1 if origin is None else step_of(origin) + 1
    kept = steps_kept(run / BATCHES)
    if missing := sorted({*range(first, step + 1)} - {*kept}):
        raise ValueError(
            f"{run / BATCHES} has no batch of steps {_ranges(missing)}, which step {step} needs after "
            f"{origin or 'the first model'}; it has {_ranges(kept)}; `checkpoint.batches` says how many a run "
            "keeps"
        )
    folder = _empty(run, step, out)
    if origin is None:
        shutil.copyfile(run / STARTED, folder / STARTED)  # the date used in the prompts
    overrides = [override.lstrip("+") for override in checked_overrides(overrides)]
    changed = [override.partition("=")[0] for override in overrides]
    settings: dict[str, Any] = {
        "trainer": {"output_dir": str(folder), "only": "train", "max_hours": 0.0},
        "data": {"batches": str((run / BATCHES).absolute()), "val_files": None},
        "checkpoint": {
            "resume": "auto" if origin is None else str(origin),
            "accept_changes": ["trainer.only", "data.batches", *(key for key in changed if alters_meaning(key))],
            "every": 0,
            "every_s": 0.0,
        },
        "logging": OFF,
    }
    recorded = _recorded(run, step)
    settings["checkpoint"]["accept_changes"] += OmegaConf.select(recorded, "checkpoint.accept_changes", default=[])
    given = OmegaConf.from_dotlist(overrides)
    tree = OmegaConf.merge(OmegaConf.structured(Config), recorded, settings, given)
    assert isinstance(tree, DictConfig)
    cfg = to_config(tree)
    return Replay(run=run, step=step, first=first, origin=origin, folder=folder, cfg=cfg, changed=tuple(changed))


def _recorded(run: Path, step: int) -> Any:
    """Returns the configuration that the step was trained with, from the sample store, else the last one of the run: a
    restart may have changed the learning rate or the number of ranks."""
    with suppress(ValueError, sqlite3.Error), Reader(run) as store:  # off, damaged, or of another version
        found = [start["config"] for start in store.starts() if step in start["steps"]]
        if found:
            return OmegaConf.create(found[0])
    return OmegaConf.load(run / CONFIG)


def _origin(run: Path, step: int) -> Path | None:
    """Returns the newest checkpoint before the step; None to start from the run's initial model."""
    if step < 1:
        raise ValueError(f"`--step` ({step}) must be at least 1")
    root = (run / CHECKPOINTS).absolute()
    before = [number for number in CheckpointStore(root, keep=0).steps() if number < step]
    return root / f"step_{max(before):06d}" if before else None


def _empty(run: Path, step: int, out: Path | None) -> Path:
    folder = (run / REPLAYS / f"step_{step:06d}" if out is None else out).absolute()
    if out is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"`--out` ({out}) is not empty; give a new directory")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
