"""Says how long before a time limit a run must be told to stop: after the signal it ends an update, then saves.

In: the planned configuration and the model's shape. Out: seconds, with their arithmetic, for people and for
`launch/slurm/train.sbatch`.
"""

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

ROOM = 1.5  # times what is estimated, as `trainer.max_hours` leaves
ENDING_S = 60.0  # for the processes to stop and for Slurm, which looks at its clock once in a while
CPU_UPDATE_S = 60.0  # nothing is estimated without GPUs; a tiny model's update takes a second or two


@dataclass(frozen=True)
class Lead:
    """Estimates the seconds from a signal to the end of the run."""

    cfg: PlannedConfig
    shape: ModelShape

    @cached_property
    def update_s(self) -> float:
        """Returns the seconds of an update that has just begun, the weight sync behind it included."""
        if self.cfg.trainer.only == "rollout":
            return 0.0
        if device_of(self.cfg) == "cpu":
            return CPU_UPDATE_S
        return Step(self.cfg, self.shape).update_s + sync_bytes(self.shape) / self.cfg.plan.sync_bandwidth

    @cached_property
    def save_s(self) -> float:
        """Returns the seconds that a checkpoint takes to reach the storage."""
        return together(ActorMemory(self.cfg, self.shape).checkpoint()) / self.cfg.plan.storage_bandwidth

    @property
    def seconds(self) -> int:
        """Returns the lead; a checkpoint that is written beside the steps may have to end first."""
        before = max(self.update_s, self.save_s) if self.cfg.checkpoint.async_save else self.update_s
        return math.ceil(ROOM * (before + self.save_s) + ENDING_S)

    def lines(self) -> list[str]:
        """Returns the lead with its arithmetic."""
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
    """Returns what a launcher needs besides the lead, one `name value` a line: the absolute output directory, and what
    the run goes on from."""
    return f"output_dir {output_path(cfg.trainer.output_dir)}\nresume {cfg.checkpoint.resume}"
