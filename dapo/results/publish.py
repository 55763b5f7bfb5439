"""Gives each checkpoint of a run its model card, and pushes its export to the Hugging Face hub. A failure here is only
a warning.

A push is `hf upload` in a process of its own, which a deadline can end and a user can repeat.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dapo.config.schema import Config
from dapo.ground.console import say, warn
from dapo.results.card import CURVE, EXPORT, write_card
from dapo.results.summary import CURVES
from dapo.state.checkpoint import step_of
from dapo.state.lease import LeaseLost
from dapo.state.run_dir import RunDirectory

KILL_S = 10  # from SIGTERM to SIGKILL
MAX_CHARS = 300  # of what a failed push printed


@contextmanager
def published(run: RunDirectory, cfg: Config, experiment: str) -> Iterator[None]:
    """Describes each checkpoint that is saved in the block, and begins its push unless one is under way. At the end of
    the block pushes the newest; if the block raises, ends the push under way. experiment: its name, "" if unknown."""
    repository = cfg.checkpoint.push_to_hub
    pushes = Pushes(repository, cfg.checkpoint.timeout_s)

    def saved(checkpoint: Path) -> None:
        _describe(run, repository, experiment)
        if step_of(checkpoint) < cfg.trainer.total_steps:
            pushes.begin(checkpoint)

    run.saved, ended = saved, False
    try:
        yield
        ended = True
    finally:
        pushes.end(_describe(run, repository, experiment, curves=True), wait=ended)


def _describe(run: RunDirectory, repository: str, experiment: str, *, curves: bool = False) -> Path | None:
    """Writes the cards of the two newest checkpoints: the policy of the earlier one may have been evaluated since.
    Returns the newest; None if there is none, or if another run owns the directory. curves: whether those of the run
    are up to the newest."""
    newest = None
    try:
        run.check()
        kept = [run.checkpoints / f"step_{step:06d}" for step in sorted(run.store.steps())[-2:]]
        newest = kept[-1] if kept else None
        if curves and newest and (newest / EXPORT).is_dir() and (run.path / CURVES).is_file():
            shutil.copyfile(run.path / CURVES, newest / EXPORT / CURVE)
        for checkpoint in kept:
            write_card(run.path, checkpoint, repository=repository, experiment=experiment)
    except LeaseLost:
        return None
    except Exception as error:  # whatever a disk, a library or a damaged file raises
        warn(f"the model cards of {run.checkpoints} are not complete: {type(error).__name__}: {error}")
    return newest


class Pushes:
    """Pushes to one repository, one at a time. Does nothing if `repository` is empty. timeout_s: for each push."""

    def __init__(self, repository: str, timeout_s: float) -> None:
        self._repository = repository
        self._timeout_s = timeout_s
        self._pushed: Path | None = None
        self._running: tuple[Path, subprocess.Popen[bytes], IO[bytes]] | None = None

    def begin(self, checkpoint: Path) -> None:
        """Begins the push of a checkpoint, unless it has no export or another push is under way."""
        self._take_result()
        if self._running is not None or not self._repository or not (checkpoint / EXPORT).is_dir():
            return
        # `timeout` also ends a push whose run was killed.
        command = ["timeout", f"--kill-after={KILL_S}", f"{self._timeout_s:f}"]
        command += [sys.executable, "-m", "huggingface_hub.cli.hf", *self._arguments(checkpoint)]
        # `dapo.config.facts.hub.unreachable` may have set HF_HUB_OFFLINE; one that the user has set was refused.
        env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "NO_COLOR": "1"}
        try:
            output = tempfile.TemporaryFile()
            child = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            self._failed(checkpoint, str(error))
        else:
            self._running = checkpoint, child, output

    def _arguments(self, checkpoint: Path) -> list[str]:
        told = f"step {step_of(checkpoint)}"
        export = str(checkpoint / EXPORT)
        return ["upload", self._repository, export, ".", "--private", "--commit-message", told]

    def end(self, newest: Path | None, *, wait: bool) -> None:
        """Ends the push under way. wait: pushes `newest` then, and waits for that."""
        self._stop()
        if newest is None or not self._repository or not (newest / EXPORT).is_dir():
            return
        if not wait:
            if newest != self._pushed:
                say(f"{newest.name} is not on the hub; by hand: {self._by_hand(newest)}")
            return
        say(f"pushing {newest.name} to {self._repository} on the hub, {self._timeout_s:g} s at most")
        self.begin(newest)
        try:
            if self._running is not None:
                self._running[1].wait()
        finally:  # also at a signal
            self._stop("stopped")

    def _stop(self, why: str = "") -> None:
        """why: for a warning if a push is under way."""
        self._take_result()
        if self._running is not None:
            checkpoint, child, output = self._running
            self._running = None
            child.terminate()
            child.wait()  # `timeout` kills the push if it must
            output.close()
            if why:
                self._failed(checkpoint, why)

    def _take_result(self) -> None:
        if self._running is None or self._running[1].poll() is None:
            return
        checkpoint, child, output = self._running
        self._running = None
        output.seek(0)
        printed = output.read().decode(errors="replace").strip()
        output.close()
        if child.returncode == 0:
            self._pushed = checkpoint
            say(f"pushed {checkpoint.name} to {self._repository} on the hub")
        elif child.returncode in (124, 137):  # of `timeout`
            self._failed(checkpoint, f"not done after `checkpoint.timeout_s` ({self._timeout_s:g} s)")
        else:
            self._failed(checkpoint, " ".join(printed[-MAX_CHARS:].split()))

    def _failed(self, checkpoint: Path, why: str) -> None:
        if not checkpoint.exists():
            warn(
                f"{checkpoint.name} was not pushed to {self._repository}: it was removed meanwhile (`checkpoint.keep`)"
            )
            return
        warn(f"{checkpoint.name} was not pushed to {self._repository}: {why}; by hand: {self._by_hand(checkpoint)}")

    def _by_hand(self, checkpoint: Path) -> str:
        return shlex.join(["hf", *self._arguments(checkpoint)])
