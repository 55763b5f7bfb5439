"""Claims the output directory of a run before anything starts; one live process holds it, `config.yaml` describes it.

In: `trainer.output_dir`, `checkpoint.resume` and the resolved configuration. Out: a held `RunDirectory`, or an error
that names the keys in which the run that is there differs from the one that was asked for.
"""

import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from dapo.state.durable import write_text

log = logging.getLogger(__name__)

CONFIG, CHECKPOINTS, METRICS, LOCK = "config.yaml", "checkpoints", "metrics.jsonl", ".lock"
FINGERPRINT = "data_fingerprint"
HEADER = "# The resolved configuration of this dapo run.\n"  # marks a config.yaml as ours to overwrite
# What a run may not change on the way: the same draw index would mean another prompt or other responses, and admission
# decides which draws are used up.
FIXED_KEYS = (
    "model.path",
    "data.train_files",
    "data.max_prompt_length",
    "data.shuffle",
    "rollout.n",
    "filter_groups.admission",
    "trainer.seed",
)


class RunDirectory:
    """Holds an output directory for this process until `release` or its end, however it ends."""

    def __init__(self, path: Path, lock: TextIO) -> None:
        self.path = path
        self._lock = lock

    @property
    def checkpoints(self) -> Path:
        """Returns the root for `dapo.state.checkpoint.CheckpointStore`."""
        return self.path / CHECKPOINTS

    def check_data(self, fingerprint: str) -> None:
        """Records `dapo.data.fingerprint` of the training prompts; raises ValueError when a run here had others."""
        path = self.path / FINGERPRINT
        if not path.exists() or not holds_steps(self.path):
            write_text(path, fingerprint + "\n")
            return
        recorded = path.read_text(encoding="utf-8").strip()
        if recorded != fingerprint:
            raise ValueError(
                f"`data.train_files` gives other prompts (fingerprint {fingerprint}) than the run in {self.path} was "
                f"trained on ({recorded}); restore the files or the tokenizer, or give another `trainer.output_dir`"
            )

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Lets another process claim the directory."""
        self._lock.close()


def claim_output_dir(output_dir: str, resume: str, config: dict[str, Any]) -> RunDirectory:
    """Takes `output_dir` for this run and writes `config` into it.

    resume: `checkpoint.resume`, "auto" or "never". config: the resolved configuration as plain containers.
    Raises ValueError when the directory holds something else, another run, or a live one.
    """
    path = Path(output_dir).expanduser().absolute()
    where = f"`trainer.output_dir` ({path})"
    try:
        path.mkdir(parents=True, exist_ok=True)
        _refuse_strangers(path, where)
        lock = _locked(path, where)
    except OSError as error:
        raise ValueError(f"{where} cannot be used ({error}); give a directory that can be written to") from error
    try:
        if holds_steps(path):
            _refuse_other_run(path, where, resume, config)
        write_text(path / CONFIG, HEADER + OmegaConf.to_yaml(OmegaConf.create(config)))
    except BaseException:
        lock.close()
        raise
    return RunDirectory(path, lock)


def holds_steps(path: Path) -> bool:
    """Returns whether a run got anywhere here. One that ended before its first line of metrics leaves nothing to
    protect."""
    metrics = path / METRICS
    return any(path.glob(f"{CHECKPOINTS}/step_*")) or (metrics.exists() and metrics.stat().st_size > 0)


def _refuse_strangers(path: Path, where: str) -> None:
    ours_early = (LOCK, f".{CONFIG}.tmp")  # what a crash before the first config.yaml may leave
    entries = sorted(entry.name for entry in path.iterdir() if entry.name not in ours_early)
    if not entries:
        return
    config = path / CONFIG
    if not config.is_file() or not config.read_bytes().startswith(HEADER.encode()):
        raise ValueError(
            f"{where} is not empty ({', '.join(entries[:3])}{', ...' if len(entries) > 3 else ''}) and holds no "
            f"{CONFIG} of a dapo run; give a new directory"
        )


def _refuse_other_run(path: Path, where: str, resume: str, config: dict[str, Any]) -> None:
    if resume == "never":
        raise ValueError(
            f"{where} holds a run and `checkpoint.resume` is never; give another `trainer.output_dir`, or "
            "checkpoint.resume=auto to continue the run"
        )
    try:
        recorded = OmegaConf.to_container(OmegaConf.load(path / CONFIG), resolve=False)
    except Exception as error:  # whatever a YAML parser raises over a damaged file
        raise ValueError(
            f"{where} holds a run whose {CONFIG} cannot be read ({error}); restore it or give a new directory"
        ) from error
    differences = [
        f"`{key}` is {_value(recorded, key)!r} there and {_value(config, key)!r} here"
        for key in FIXED_KEYS
        if _value(recorded, key) != _value(config, key)
    ]
    if differences:
        raise ValueError(
            f"{where} holds another run: {', '.join(differences)}; give another `trainer.output_dir`, or the values "
            "of the run that is there to continue it"
        )


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def _locked(path: Path, where: str) -> TextIO:
    """Returns the lock file, locked by the kernel, which lets go when the process dies: there is no stale lock to
    remove."""
    lock = (path / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise ValueError(
            f"{where} is in use by a live run ({holder}); wait for it, or give another `trainer.output_dir`"
        ) from error
    except OSError as error:
        log.warning("%s cannot be locked (%s); make sure that no other run uses it", path, error)
    lock.seek(0)
    lock.truncate()
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock
