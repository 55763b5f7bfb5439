"""Computes how long before a time limit a run must be signalled: it then finishes an update and saves. Used by
`launch/slurm/train.sbatch`."""

import math
from dataclasses import dataclass
from functools import cached_property

from dapo.config.facts.model_shape import ModelShape
from dapo.config.paths import output_path
from dapo.config.plan import PlannedConfig
from dapo.derived import device_of
from dapo.plan.actor import ActorMemory
from dapo.plan.step import Step, sync_bytes
from dapo.plan.terms import duration, size, together

ROOM = 1.5  # safety factor, the same as for `trainer.max_hours`
ENDING_S = 60.0  # for the processes to stop, and for Slurm's coarse timer
CPU_UPDATE_S = 60.0  # there are no estimates without GPUs; a tiny model's update takes a second or two


@dataclass(frozen=True)
class Lead:
    cfg: PlannedConfig
    shape: ModelShape

    @cached_property
    def update_s(self) -> float:
        """Seconds of an update that has just begun, with the weight sync after it."""
        if self.cfg.trainer.only == "rollout":
            return 0.0
        if device_of(self.cfg) == "cpu":
            return CPU_UPDATE_S
        return Step(self.cfg, self.shape).update_s + sync_bytes(self.shape) / self.cfg.plan.sync_bandwidth

    @cached_property
    def save_s(self) -> float:
        return together(ActorMemory(self.cfg, self.shape).checkpoint()) / self.cfg.plan.storage_bandwidth

    @property
    def seconds(self) -> int:
        """The lead; an earlier asynchronous save may have to finish first."""
        before = max(self.update_s, self.save_s) if self.cfg.checkpoint.async_save else self.update_s
        return math.ceil(ROOM * (before + self.save_s) + ENDING_S)

    def lines(self) -> list[str]:
        written = size(self.save_s * self.cfg.plan.storage_bandwidth)
        first = f"the update {duration(self.update_s)}"
        if self.cfg.checkpoint.async_save and self.save_s > self.update_s:
            first = f"the save that may run beside it {duration(self.save_s)}"
        return [
            f"SIGNAL BEFORE A TIME LIMIT: {self.seconds:,} s = {ROOM:g} x ({first} + a save {duration(self.save_s)}) + "
            f"{ENDING_S:g} s",
            f"  a save: {written} at {size(self.cfg.plan.storage_bandwidth)}/s (assumed: plan.storage_bandwidth)",
        ]


def job(cfg: PlannedConfig) -> str:
    """Returns the launcher's other values, one `name value` per line: output directory, and what to resume from."""
    return f"output_dir {output_path(cfg.trainer.output_dir)}\nresume {cfg.checkpoint.resume}"
