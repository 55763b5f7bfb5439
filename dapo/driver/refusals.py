"""Sets aside batches that must not be trained on, so that the run continues and a user can replay them. This applies to
a batch that all ranks refused, a batch whose update has lost the ranks twice, and mini-batches whose optimizer step was
skipped. They are written to files (`dapo.state.quarantine`); their prompts are drawn again with other seeds, and no
restart takes the groups again (`dapo.state.voided`). The run ends if that does not help."""

from collections.abc import Sequence
from pathlib import Path

from dapo.algorithm.batch import deal
from dapo.config.schema import Config
from dapo.ground.console import warn
from dapo.pools import ActorsLost, BatchRefused, Updated
from dapo.sampling.buffer import OversamplingBuffer
from dapo.state.quarantine import QUARANTINE, set_aside
from dapo.state.voided import Voided
from dapo.types import Collected, Group

MAX_IN_A_ROW = 3
MAX_LOSSES = 2  # of the ranks, in updates with the same batch: a single one is usually chance


class NotFinite(RuntimeError):
    """Too many optimizer steps in a row were skipped; what was trained before is intact."""


class Refusals:
    """Counts refused batches in a row, and losses of the ranks with the same batch."""

    def __init__(self, cfg: Config, output_dir: Path, buffer: OversamplingBuffer, voided: Voided) -> None:
        self._cfg = cfg
        self._buffer = buffer
        self._voided = voided
        self._output_dir = output_dir
        self._in_a_row = 0

    def refused(self, collected: Collected, error: BatchRefused, version: int) -> None:
        """Sets the groups of a refused batch aside and returns their draws to the stream. Raises `error` when
        `MAX_IN_A_ROW` batches were refused one after the other."""
        self._voided.add(self._buffer.in_training(), version)
        self._put(collected.groups, version, error.reason, str(error))
        self._buffer.refused()
        self._in_a_row += 1
        if self._in_a_row >= MAX_IN_A_ROW:
            raise error
        warn(f"a batch was set aside ({self._in_a_row} in a row; {MAX_IN_A_ROW} end the run): {error}")

    def lost(self, collected: Collected, error: ActorsLost, version: int) -> ActorsLost:
        """Returns `error` with what happens to the batch whose update from policy `version` has lost the ranks. After
        `MAX_LOSSES`, counted across restarts, it is set aside, and the next trainer draws its prompts again."""
        times = self._voided.lost(collected.groups, version)
        where = f"{error}; it happened in the update from policy version {version}"
        if times < MAX_LOSSES:
            return ActorsLost(f"{where}; once more with this batch, and it is set aside under {QUARANTINE}/")
        self._voided.add(self._buffer.in_training(), version)
        path = self._put(collected.groups, version, "lost", str(error))
        put = f"written to {path}" if path else f"not written to {QUARANTINE}/ (the log says why)"
        return ActorsLost(f"{where}, {times} times with the same batch, which is set aside: {put}")

    def updated(self, collected: Collected, updated: Updated, version: int) -> None:
        """Sets the groups of skipped mini-batches aside. version: the one that the update started from. Raises
        NotFinite when too many optimizer steps in a row were skipped."""
        self._in_a_row = 0
        self._voided.trained(version)
        if updated.skipped:
            minibatches, _ = deal(len(collected.groups), self._cfg, version=version)
            groups = [collected.groups[i] for k in updated.skipped for i in minibatches[k]]
            message = updated.stop or f"optimizer steps on mini-batches {list(updated.skipped)} were skipped"
            self._put(groups, version, "nonfinite", message)
        if updated.stop:
            raise NotFinite(updated.stop)

    def _put(self, groups: Sequence[Group], version: int, reason: str, message: str) -> Path | None:
        started = [(group, version) for group in groups]
        return set_aside(self._output_dir, started, version=version, reason=reason, message=message)
