"""Writes checkpoints: one directory per step, complete or absent.

    step_N.TOKEN.tmp ─sealed─▶ step_N          (`dapo.state.manifest` seals and verifies)
    a former step_N ──▶ step_N.TOKEN.gone ──▶ removed once the new one is in place

At every moment one of these directories is intact, and `recover` finds it after a crash.
"""

import asyncio
import logging
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from dapo.ground.durable import remove, sync_directory, write_text
from dapo.ground.fault_points import fault_point
from dapo.ground.signals import finish
from dapo.ground.watchdog import waiting
from dapo.state.manifest import MANIFEST, BrokenCheckpoint, seal, verify

log = logging.getLogger(__name__)

LATEST = "LATEST"  # for users and scripts; dapo itself takes the newest intact checkpoint
STEP_NAME = re.compile(r"step_(\d{6,})")
TEMPORARY = ".tmp"  # being written: complete once its manifest exists
CONDEMNED = ".gone"  # being removed, never used again
LEFT = "left_"  # replaces `step_`: of a branch abandoned by `checkpoint.resume`


class CheckpointStore:
    """The checkpoints of one run. Reading changes nothing; only the run that owns the directory may write."""

    def __init__(
        self,
        root: Path,
        *,
        keep: int,
        origin: Path | None = None,
        record: Callable[[Path], None] = lambda directory: None,
        guard: Callable[[], None] = lambda: None,
        placed: Callable[[int], None] = lambda step: None,
    ) -> None:
        """root: usually OUTPUT_DIR/checkpoints, need not exist. keep: number of newest checkpoints to keep, 0 = all.
        origin: a checkpoint of another run, used while there is none here. record: adds the run's own files to a
        checkpoint. guard: raises if the run may not write any more. placed: called with the step of each checkpoint
        that is in its place."""
        self._root = root
        self._keep = keep
        self._origin = origin
        self._record = record
        self._guard = guard
        self._placed = placed
        self._faults: dict[Path, str] = {}  # "": intact. Only this process writes here: nothing is hashed twice
        self._back: int | None = None  # the step to go back to: later ones count no more
        # Whether groups sampled before keep their meaning, and whether the prompt history is of the same prompts.
        self.keeps_groups = self.keeps_history = True

    @asynccontextmanager
    async def writing(self, step: int) -> AsyncIterator[Path]:
        """Yields a directory to write the checkpoint of `step` into: committed at the end, removed if the body raises.

        Hashing and moving runs in a thread, so that generation can go on. A checkpoint of the same step is replaced.
        Later ones are renamed: they belong to a branch that resuming has abandoned. A cancellation after the body is
        raised after the commit.
        """
        self._guard()  # before clearing: another run may own the directory now
        self._root.mkdir(parents=True, exist_ok=True)
        self._clear()
        # A new name each time: a rank that still writes for an abandoned save must not write here.
        temporary = self._root / f"step_{step:06d}.{secrets.token_hex(4)}{TEMPORARY}"
        temporary.mkdir()
        try:
            yield temporary
            with waiting(f"the checkpoint of step {step} to be hashed and moved into its place"):
                await finish(asyncio.to_thread(self._seal_and_commit, step, temporary))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # already renamed if committed
            raise

    def _seal_and_commit(self, step: int, temporary: Path) -> None:
        fault_point("save.written")
        self._record(temporary)
        seal(temporary)
        self._guard()
        fault_point("save.sealed")
        self._place(temporary, self._root / f"step_{step:06d}")
        fault_point("save.placed")
        try:
            write_text(self._root / LATEST, f"step_{step:06d}\n")
            self._placed(step)
            self._prune(step)
        except OSError as error:
            log.warning("step %d is saved, but what names it or is older cannot be changed: %s", step, error)
        self.keeps_groups = self.keeps_history = True

    def _place(self, temporary: Path, final: Path) -> None:
        """Moves a sealed directory to its final name; on failure, the former one is restored."""
        self._faults.pop(final, None)
        former = self._condemned(final)
        if final.exists():
            final.replace(former)
        fault_point("save.aside")
        try:
            temporary.replace(final)
        except BaseException:
            if former.exists():
                former.replace(final)
            raise
        sync_directory(self._root)
        remove(former)

    def recover(self) -> None:
        """Finishes or undoes what a crash interrupted. Only for the run that owns the directory, before it reads.

        An intact sealed directory becomes the checkpoint of its step; other left-overs are removed. Raises Unreadable,
        before anything else is removed, if it cannot tell what is intact.
        """
        if not self._root.is_dir():
            return
        for temporary in sorted(self._root.glob(f"step_*{TEMPORARY}")):
            name = temporary.name.split(".")[0]
            if STEP_NAME.fullmatch(name) and (temporary / MANIFEST).is_file() and self._is_whole(temporary):
                log.warning("%s was complete when the run was killed; it is taken as %s", temporary, name)
                self._place(temporary, self._root / name)
                self._faults[self._root / name] = self._faults.pop(temporary)
        self._clear()

    def _clear(self) -> None:
        for pattern in (f"*{TEMPORARY}", f"*{CONDEMNED}"):
            for left_over in self._root.glob(pattern):
                remove(left_over)

    def latest(self) -> Path | None:
        """Returns the newest intact checkpoint, `origin` if there is none at all, else None. Hashes it unless done
        before: minutes if it is large.

        Raises ValueError if there are checkpoints but none is intact, because starting again would be a silent loss;
        for the same reason Unreadable if one cannot be read that is newer than all intact ones.
        """
        broken: list[str] = []
        for path in sorted(self._steps(), key=step_of, reverse=True):
            if self._is_whole(path):
                return path
            broken.append(self._faults[path])
        if broken:
            raise ValueError(
                f"no checkpoint under {self._root} is whole ({'; '.join(broken)}); give another `trainer.output_dir` "
                "to start the run again"
            )
        if self._origin is not None:
            try:
                self.check(self._origin)
            except BrokenCheckpoint as error:
                raise ValueError(f"`checkpoint.resume` ({self._origin}): {error}; give another checkpoint") from error
        return self._origin

    def check(self, path: Path) -> None:
        """Raises BrokenCheckpoint or Unreadable unless the checkpoint is intact. Hashes it only once."""
        if path not in self._faults:
            try:
                verify(path)
                self._faults[path] = ""
            except BrokenCheckpoint as error:
                self._faults[path] = str(error)
        if self._faults[path]:
            raise BrokenCheckpoint(self._faults[path])

    def _is_whole(self, path: Path) -> bool:
        known = path in self._faults
        try:
            self.check(path)
        except BrokenCheckpoint as error:
            if not known:
                log.warning("skipping a broken checkpoint: %s", error)
            return False
        return True

    def completed(self, total_steps: int) -> Path | None:
        newest = self.latest()
        return newest if newest is not None and step_of(newest) >= total_steps else None

    def go_back_to(self, path: Path) -> list[Path]:
        """Makes `path` the newest; returns the later ones, which stay until `leave_later`. Raises as `check` does."""
        self.check(path)
        later = sorted(found for found in self._steps() if step_of(found) > step_of(path))
        self._back = step_of(path)
        return later

    def leave_later(self) -> None:
        """Renames the checkpoints after the one to go back to, so that no start finds them, and has `LATEST` name the
        newest: a kill may have come between placing and naming it."""
        back, self._back = self._back, None
        if back is not None:
            for path in self._steps():
                if step_of(path) > back:
                    self._leave(path)
        if self._steps() and (newest := self.latest()) is not None:
            write_text(self._root / LATEST, f"{newest.name}\n")

    def _leave(self, path: Path) -> None:
        left = path.with_name(path.name.replace("step_", LEFT, 1))
        if left.exists():
            remove(left)
        path.replace(left)

    def steps(self) -> list[int]:
        return [step_of(path) for path in self._steps()]

    def _steps(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        there = [path for path in self._root.iterdir() if STEP_NAME.fullmatch(path.name) and path.is_dir()]
        return [path for path in there if self._back is None or step_of(path) <= self._back]

    def _prune(self, written: int) -> None:
        earlier = sorted((path for path in self._steps() if step_of(path) < written), key=step_of, reverse=True)
        for path in [path for path in self._steps() if step_of(path) > written]:
            self._leave(path)  # may be all that is left of another branch
        for path in earlier[self._keep - 1 :] if self._keep > 0 else []:
            self._faults.pop(path, None)
            condemned = self._condemned(path)  # a crash leaves a left-over and not half a checkpoint
            path.replace(condemned)
            remove(condemned)

    def _condemned(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.{secrets.token_hex(4)}{CONDEMNED}")


def step_of(path: Path) -> int:
    match = STEP_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is no checkpoint; its name must be step_ and at least six digits")
    return int(match.group(1))
