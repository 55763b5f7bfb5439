"""Writes checkpoints: one directory per step, complete or absent.

    step_N.TOKEN.tmp ─sealed─▶ step_N          (`dapo.state.manifest` seals and verifies)
    a former step_N ──▶ step_N.aside ──▶ removed once the new one and `LATEST` are in place

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
from dapo.ground.watchdog import waiting
from dapo.state.manifest import MANIFEST, BrokenCheckpoint, seal, verify

log = logging.getLogger(__name__)

LATEST = "LATEST"  # for users and scripts; dapo itself takes the newest intact checkpoint
STEP_NAME = re.compile(r"step_(\d{6,})")
TEMPORARY = ".tmp"  # being written: complete once its manifest exists
ASIDE = ".aside"  # intact, until the new one of the same step is in place
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
        self._writing = asyncio.Lock()
        self._faults: dict[Path, str] = {}  # "": intact. Only this process writes here: nothing is hashed twice
        self._misnamed: str | None = None
        self._back: tuple[Path, list[Path]] | None = None  # the checkpoint to go back to, and later ones still there
        # Whether groups sampled before keep their meaning, and whether the prompt history is of the same prompts.
        self.keeps_groups = self.keeps_history = True

    @asynccontextmanager
    async def writing(self, step: int) -> AsyncIterator[Path]:
        """Yields a directory to write the checkpoint of `step` into: committed at the end, removed if the body raises.

        Hashing and moving runs in a thread, so that generation can go on. A checkpoint of the same step is replaced.
        Later ones are renamed: they belong to a branch that resuming has abandoned. A second call waits for the first
        one. A cancellation after the body is raised after the commit.
        """
        async with self._writing:
            self._guard()  # before clearing: another run may own the directory now
            self._root.mkdir(parents=True, exist_ok=True)
            self._clear()
            # A new name each time: a rank that still writes for an abandoned save must not write here.
            temporary = self._root / f"step_{step:06d}.{secrets.token_hex(4)}{TEMPORARY}"
            temporary.mkdir()
            try:
                yield temporary
                with waiting(f"the checkpoint of step {step} to be hashed and moved into its place"):
                    await _to_its_end(self._seal_and_commit, step, temporary)
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
        self._placed(step)
        self._prune(step)
        self.keeps_groups = self.keeps_history = True

    def _place(self, temporary: Path, final: Path) -> None:
        """Moves a sealed directory to its final name; on failure, the former one is restored."""
        self._faults.pop(final, None)
        aside = final.with_name(final.name + ASIDE)
        if final.exists():
            final.replace(aside)
        fault_point("save.aside")
        try:
            temporary.replace(final)
        except BaseException:
            if aside.exists():
                aside.replace(final)
            raise
        sync_directory(self._root)
        try:
            write_text(self._root / LATEST, final.name + "\n")
        except OSError as error:
            log.warning("%s could not be written (%s); %s is complete all the same", self._root / LATEST, error, final)
        if aside.exists():
            self._discard(aside)

    def recover(self) -> None:
        """Finishes or undoes what a crash interrupted. Only for the run that owns the directory, before it reads.

        An intact sealed directory becomes the checkpoint of its step; one that was moved aside is restored if nothing
        intact is in its place; other left-overs are removed. Raises Unreadable, before anything else is
        removed, if it cannot tell what is intact.
        """
        if not self._root.is_dir():
            return
        for temporary in sorted(self._root.glob(f"step_*{TEMPORARY}")):
            name = temporary.name.split(".")[0]
            if STEP_NAME.fullmatch(name) and (temporary / MANIFEST).is_file() and self._is_whole(temporary):
                log.warning("%s was complete when the run was killed; it is taken as %s", temporary, name)
                self._place(temporary, self._root / name)
                self._faults[self._root / name] = self._faults.pop(temporary)
        for aside in self._root.glob(f"step_*{ASIDE}"):
            final = self._root / aside.name.removesuffix(ASIDE)
            if final.exists() and (self._is_whole(final) or not self._is_whole(aside)):
                continue
            log.warning("%s is taken back: nothing whole came into its place", aside)
            if final.exists():
                self._discard(final)
            aside.replace(final)
        self._clear()

    def _clear(self) -> None:
        for left_over in self._root.glob(f"*{TEMPORARY}"):
            remove(left_over)
        for left_over in self._root.glob(f"*{CONDEMNED}"):
            remove(left_over)
        for aside in self._root.glob(f"step_*{ASIDE}"):
            if aside.with_name(aside.name.removesuffix(ASIDE)).exists():
                self._discard(aside)

    def latest(self) -> Path | None:
        """Returns the newest intact checkpoint, `origin` if there is none at all, else None. Hashes it unless done
        before: minutes if it is large.

        Raises ValueError if there are checkpoints but none is intact, because starting again would be a silent loss;
        for the same reason Unreadable if one cannot be read that is newer than all intact ones.
        """
        broken: list[str] = []
        for path in sorted(self._steps(), key=step_of, reverse=True):
            if self._is_whole(path):
                self._check_name(path)
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
        self._back = path, later
        return later

    def leave_later(self) -> None:
        """Renames the checkpoints that `go_back_to` returned, so that no start finds them."""
        if self._back is None:
            return
        path, later = self._back
        for found in later:
            self._leave(found)
        write_text(self._root / LATEST, path.name + "\n")
        self._back = None

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
        left = self._back[1] if self._back else []
        there = [path for path in self._root.iterdir() if STEP_NAME.fullmatch(path.name) and path not in left]
        return [path for path in there if path.is_dir()]

    def _check_name(self, taken: Path) -> None:
        if self._back is not None:
            return
        try:
            name = (self._root / LATEST).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            name = f"nothing that can be read ({error})"
        if name != taken.name and name != self._misnamed:  # warn once
            self._misnamed = name
            log.warning("%s names %r; the newest whole checkpoint is %s", self._root / LATEST, name, taken.name)

    def _prune(self, written: int) -> None:
        earlier = sorted((path for path in self._steps() if step_of(path) < written), key=step_of, reverse=True)
        for path in [path for path in self._steps() if step_of(path) > written]:
            self._leave(path)  # may be all that is left of another branch
        for path in earlier[self._keep - 1 :] if self._keep > 0 else []:
            try:
                self._discard(path)
            except OSError as error:  # the new checkpoint is not affected
                log.warning("%s cannot be removed (%s)", path, error)

    def _discard(self, path: Path) -> None:
        """Renames before removing, so that a crash leaves a left-over and not half a checkpoint."""
        self._faults.pop(path, None)
        condemned = path.with_name(f"{path.name}.{secrets.token_hex(4)}{CONDEMNED}")
        path.replace(condemned)
        remove(condemned)


def step_of(path: Path) -> int:
    match = STEP_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is no checkpoint; its name must be step_ and at least six digits")
    return int(match.group(1))


async def _to_its_end(function: Callable[..., None], *arguments: object) -> None:
    """Runs `function` in a thread. A thread cannot be stopped: a cancellation is raised when it has ended."""
    task = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from task.exception()
    task.result()
