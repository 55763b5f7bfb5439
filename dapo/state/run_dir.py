"""Claims the output directory of a run before anything starts; one live process holds it, `config.yaml` describes it. A
resumed run is compared with the files (`ABOUT`) in its checkpoint; the error names the keys that differ."""

import contextlib
import json
import logging
import secrets
import shutil
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from dapo.config.paths import output_path
from dapo.config.schema import RESUME
from dapo.ground.durable import make_folder, remove_empty, write_text
from dapo.ground.redact import redacted
from dapo.state.changes import alters_course, alters_meaning, changes, check_accepted, is_accepted, value_of
from dapo.state.checkpoint import STEP_NAME, CheckpointStore, step_of
from dapo.state.journal import JOURNAL, Journal, holds_groups
from dapo.state.lease import LEASE, LOCK, Lease, LeaseLost, hold
from dapo.state.manifest import BrokenCheckpoint

log = logging.getLogger(__name__)

CONFIG, CHECKPOINTS, METRICS = "config.yaml", "checkpoints", "metrics.jsonl"
INPUTS = "inputs.json"  # what the run reads: model, data, functions of the user's own
FINGERPRINT, STARTED, TOKEN = "data_fingerprint", "started", ".shared"
SAVED = "saved"  # step of the newest checkpoint written by the run
ABOUT, NODES = "run", "nodes"  # folders: copies of these files in a checkpoint; logs of a launcher
COPIED = (CONFIG, FINGERPRINT, STARTED, INPUTS)
EARLY = {*COPIED, TOKEN, LOCK, LEASE}  # what is in a new directory before `RunDirectory.begin`
HEADER = "# The resolved configuration of this dapo run.\n"  # marks a config.yaml as ours to overwrite


class RunDirectory:
    """Holds an output directory until `release` or the end of the process. If it has a run, nothing of that changes
    before `begin`: a refused start leaves it as it was.

    store: its checkpoints. notices: lines to show to the user at this start. accepted: keys that alter the run's
    meaning, differ from those of the checkpoint, and are in `checkpoint.accept_changes`; groups sampled before have
    another meaning then. check, when_lost: of the lease. same_prompts: whether the prompts are those of the run before.
    saved: called with each checkpoint that is in its place; must not raise.
    """

    def __init__(self, path: Path, lock: TextIO, lease: Lease, config: dict[str, Any], made: Sequence[Path]) -> None:
        """made: the folders that this claim has made, the inner ones first."""
        self.path = path
        self._made = made
        self.checkpoints = path / CHECKPOINTS
        self.notices: list[str] = []
        self.accepted: list[str] = []
        self.same_prompts = True
        self.saved: Callable[[Path], None] = lambda checkpoint: None
        self._config = config
        self._accept = list(value_of(config, "checkpoint.accept_changes") or [])
        self._before: Path | None = None  # folder of the files `COPIED` of the run that is resumed
        self._later: dict[str, str] | None = None  # files that `begin` writes; None: written at once
        self._lock = lock
        self._lease = lease
        self.check, self.when_lost = lease.check, lease.when_lost
        self._where = _named(path)
        self.store = self._open(None)

    def _open(self, origin: Path | None) -> CheckpointStore:
        keep = int(value_of(self._config, "checkpoint.keep") or 0)
        hooks: dict[str, Any] = {"record": self._record, "guard": self.check, "placed": self._note_saved}
        return CheckpointStore(self.checkpoints, keep=keep, origin=origin, **hooks)

    @property
    def started(self) -> datetime:
        """When the run was first started, in local time: the date used in its prompts."""
        return datetime.fromisoformat(self._started().strip())

    def token(self) -> tuple[str, str]:
        """Writes a file with random content and returns its path and content: who can read it shares the directory."""
        path, content = self.path / TOKEN, secrets.token_hex(16)
        write_text(path, content)
        return str(path), content

    def check_data(self, fingerprint: str) -> None:
        """Records the fingerprint of the training prompts; raises ValueError if it changed and that is not accepted."""
        recorded = self._before / FINGERPRINT if self._before else None
        if recorded and recorded.exists() and (before := recorded.read_text(encoding="utf-8").strip()) != fingerprint:
            what = f"gives other prompts (fingerprint {fingerprint}) than the run in {self.path} was trained on"
            self._allow("data.train_files", f"{what} ({before})", "restore the files or the tokenizer")
            self.same_prompts = False
        self._write(FINGERPRINT, fingerprint + "\n")

    def check_own(self, found: dict[str, str]) -> None:
        """Raises ValueError if user-defined functions changed (`dapo.algorithm.own.loading.digests`), unless that is
        accepted."""
        before = read_inputs(self._before) if self._before else {}
        for key in (key for key, now in found.items() if before.get(key, now) != now):
            what = f"is another function ({found[key]}) than that of the run in {self.path} ({before[key]})"
            self._allow(key, what, "restore the file")

    def _allow(self, key: str, what: str, remedy: str) -> None:
        if not is_accepted(key, self._accept):
            accept = f"accept it with checkpoint.accept_changes=[{key}]"
            raise ValueError(f"`{key}` {what}; {remedy}, give another `trainer.output_dir`, or {accept}")
        if key not in self.accepted:
            self.accepted.append(key)

    def record_inputs(self, found: dict[str, str]) -> list[str]:
        """Returns a line for each input that is another than before."""
        here: dict[str, str] = redacted(found)
        self._write(INPUTS, json.dumps(here, indent=1) + "\n")
        there = read_inputs(self._before) if self._before else {}
        return [f"`{key}` was {there[key]}, and is {now}" for key, now in here.items() if there.get(key, now) != now]

    def go_on(self, resume: str) -> None:
        """Finds the checkpoint to resume from, and compares its configuration. Raises ValueError."""
        check_accepted(self._accept)
        held = holds_steps(self.path)
        if held and resume == "never":
            raise ValueError(
                f"{self._where} holds a run and `checkpoint.resume` is never; give another `trainer.output_dir`, or "
                "checkpoint.resume=auto to continue the run"
            )
        self.store.recover()
        back = None if resume in RESUME else self._start_from(Path(resume).expanduser().absolute(), resume, held)
        if back is None and not self.store.steps():
            self._check_none_was_saved()
        if (newest := back or self.store.latest()) is not None or held:
            self._before = newest / ABOUT if newest else self.path
            self._compare(self._read_config(self._before))
        self._later = {} if held else None
        if back is not None and (later := self.store.go_back_to(back)):
            told = f"going back to step {step_of(back)}; {len(later)} later checkpoints are kept as left_*"
            self.notices.insert(0, f"`checkpoint.resume` ({resume}): {told}")

    def _read_config(self, folder: Path) -> dict[str, Any]:
        try:
            recorded = OmegaConf.to_container(OmegaConf.load(folder / CONFIG), resolve=False)
        except Exception as error:  # a YAML parser raises anything on a damaged file
            raise ValueError(
                f"{self._where} holds a run whose {CONFIG} cannot be read ({error}); restore it or give a new directory"
            ) from error
        return {str(key): value for key, value in recorded.items()} if isinstance(recorded, dict) else {}

    def _check_none_was_saved(self) -> None:
        """Raises ValueError if this run has had checkpoints, which may come back: starting anew would erase its
        records."""
        saved = self.path / SAVED
        if saved.exists():
            step = saved.read_text(encoding="utf-8", errors="replace").strip()
            raise ValueError(
                f"{self._where} has had checkpoints, the last one of step {step}, and {self.checkpoints} holds none; "
                "is its disk mounted? Bring them back, or give another `trainer.output_dir`; to begin at step 0 and "
                f"lose the run's records, remove {saved}"
            )

    def _note_saved(self, step: int) -> None:
        write_text(self.path / SAVED, f"{step}\n")
        self.saved(self.checkpoints / f"step_{step:06d}")

    def _start_from(self, chosen: Path, resume: str, held: bool) -> Path | None:
        """Applies `checkpoint.resume`, a path, unless this run has already resumed from there. Returns the checkpoint
        of this run to go back to, if it is one."""
        key, ours = f"`checkpoint.resume` ({resume})", chosen.parent.resolve() == self.checkpoints.resolve()
        before = self._read_config(self.path) if held else {}
        if held and value_of(before, "checkpoint.resume") == resume:
            if self.store.steps():
                self._check_course(before, key)
                self.notices.append(f"{key}: the run has gone on from there; it continues with its newest checkpoint")
                return None
        elif held and not ours:
            raise ValueError(
                f"{self._where} holds a run and {key} is a checkpoint of another; give another `trainer.output_dir`"
            )
        if not (STEP_NAME.fullmatch(chosen.name) and chosen.is_dir()):
            raise ValueError(f"{key} is no checkpoint; give auto, never, or a directory checkpoints/step_NNNNNN")
        if not ours:
            self.store = self._open(chosen)
            return None
        try:
            self.store.check(back := self.checkpoints / chosen.name)
        except BrokenCheckpoint as error:
            raise ValueError(f"{key} is not whole: {error}; give another checkpoint") from error
        return back

    def _check_course(self, before: dict[str, Any], key: str) -> None:
        """Raises ValueError if other settings come with the same `checkpoint.resume`: their intention is unclear."""
        differences = [change for change in changes(before, self._config) if alters_course(change.key)]
        if differences:
            raise ValueError(
                f"{self._where}: the run has gone on from {key}, and now {', '.join(map(str, differences))}; to begin "
                "there once more, give another `trainer.output_dir`; to go on from the newest checkpoint with what has "
                "changed, give checkpoint.resume=auto"
            )

    def _compare(self, recorded: dict[str, Any]) -> None:
        differences = changes(recorded, self._config)
        altering = [change for change in differences if alters_meaning(change.key)]
        refused = [change for change in altering if not is_accepted(change.key, self._accept)]
        if refused:
            names = ",".join(change.key for change in refused)
            raise ValueError(
                f"{self._where} holds another run: {', '.join(map(str, refused))}; give another `trainer.output_dir`, "
                "or the values of the run that is there to continue it, or accept the change with "
                f"checkpoint.accept_changes=[{names}]"
            )
        self.accepted = [change.key for change in altering]
        if differences:
            told = ", ".join(f"{change.key} {change.there!r} → {change.here!r}" for change in differences)
            self.notices.append(f"changed since the last checkpoint: {told}")

    def record(self) -> None:
        self._write(STARTED, self._started())
        self._write(CONFIG, HEADER + OmegaConf.to_yaml(OmegaConf.create(redacted(self._config))))

    def _started(self) -> str:
        there = [folder / STARTED for folder in (self._before, self.path) if folder and (folder / STARTED).exists()]
        return there[0].read_text(encoding="utf-8") if there else datetime.now().isoformat(timespec="seconds") + "\n"

    def _write(self, name: str, text: str) -> None:
        if self._later is None:
            write_text(self.path / name, text)
        else:
            self._later[name] = text

    def begin(self) -> None:
        """Goes back if `checkpoint.resume` requires it, and writes what was recorded; the start is final then."""
        self.check()
        self._made = ()
        self.store.leave_later()
        if self.accepted:  # if this start dies next, no groups may remain that do not fit `config.yaml`
            Journal(self.path / JOURNAL, "", warn=log.warning).remove()
        noted, self._later = self._later or {}, None
        for name, text in noted.items():
            self._write(name, text)

    def _record(self, checkpoint: Path) -> None:
        (checkpoint / ABOUT).mkdir()
        for name in COPIED:
            if (self.path / name).exists():
                shutil.copyfile(self.path / name, checkpoint / ABOUT / name)

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.forget()
        self.release()

    def forget(self) -> None:
        """Removes the folders that the claim has made, if the run has not begun."""
        with contextlib.suppress(OSError, LeaseLost):
            self.check()
            if self._made and {each.name for each in self.path.iterdir()} <= EARLY:
                self._lease.release()
                shutil.rmtree(self.path)  # also the lock, which is held until then
                remove_empty(self._made[1:])

    def release(self) -> None:
        self._lease.release()
        self._lock.close()


def claim_output_dir(output_dir: str, resume: str, config: dict[str, Any]) -> RunDirectory:
    """Claims `output_dir` and records `config`; if it has a run, only `RunDirectory.begin` writes it. resume:
    `checkpoint.resume`. config: resolved, as plain containers. Hashes the checkpoint to resume from. Raises ValueError
    as `output_path` does, and if the directory has something else, another run, or a live one."""
    path = output_path(output_dir)
    where = _named(path)
    try:
        made = make_folder(path)
        _refuse_strangers(path, where)
        run = RunDirectory(path, *hold(path, where), config, made)
    except OSError as error:
        raise ValueError(f"{where} cannot be used ({error}); give a directory that can be written to") from error
    try:
        run.go_on(resume)
        run.record()
    except BaseException:
        run.forget()
        run.release()
        raise
    return run


def read_inputs(folder: Path) -> dict[str, str]:
    path = folder / INPUTS
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def holds_steps(path: Path) -> bool:
    """Whether a run made progress here: a checkpoint, a line of metrics or a group of the journal."""
    metrics = path / METRICS
    lines = metrics.exists() and metrics.stat().st_size > 0
    return lines or any(path.glob(f"{CHECKPOINTS}/step_*")) or holds_groups(path)


def _named(path: Path) -> str:
    return f"`trainer.output_dir` ({path})"


def _refuse_strangers(path: Path, where: str) -> None:
    early = (LOCK, LEASE, f".{CONFIG}.", STARTED, f".{STARTED}.", "evaluation_")  # from a crash, from `dapo.evaluate`
    entries = sorted(each.name for each in path.iterdir() if each.name != NODES and not each.name.startswith(early))
    if not entries:
        return
    config = path / CONFIG
    if not config.is_file() or not config.read_bytes().startswith(HEADER.encode()):
        raise ValueError(
            f"{where} is not empty ({', '.join(entries[:3])}{', ...' if len(entries) > 3 else ''}) and holds no "
            f"{CONFIG} of a dapo run; give a new directory"
        )
