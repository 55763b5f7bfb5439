"""The driver's state besides the groups, `driver.json` in a checkpoint. It is read before any heavy import."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dapo.ground.durable import tried
from dapo.report.log import evaluated
from dapo.sampling.draws import BufferState

DRIVER_STATE = "driver.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """What a run still owes for its policy. evaluate: the evaluation of this version. lines: metrics that are not in
    `metrics.jsonl` yet (`dapo.report.log.MetricsLogger.unwritten`)."""

    evaluate: bool = False
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverState:
    """The driver's state besides the groups. version: completed updates. buffer: `OversamplingBuffer.state()`."""

    version: int
    buffer: BufferState
    due: Due = Due()

    def without(self, held: Sequence[int]) -> "DriverState":
        retry = sorted([*self.buffer.retry, *held])
        return replace(self, buffer=replace(self.buffer, retry=retry, drawn_now=0))

    def write(self, directory: Path) -> None:
        (directory / DRIVER_STATE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "DriverState":
        values = json.loads(tried(lambda: (directory / DRIVER_STATE).read_text(encoding="utf-8")))
        due = Due(evaluate=values["due"]["evaluate"], lines=tuple(values["due"]["lines"]))
        return cls(version=values["version"], buffer=BufferState(**values["buffer"]), due=due)

    def owes_evaluation(self, output_dir: Path) -> bool:
        """Whether the run in output_dir ended before it had evaluated this policy."""
        return self.due.evaluate and not evaluated(output_dir, self.version)


def owes_evaluation(directory: Path, output_dir: Path) -> bool:
    """Whether the run in output_dir ended before it had evaluated the policy saved in `directory`."""
    return DriverState.read(directory).owes_evaluation(output_dir)
