"""Writes what a run reports: `metrics.jsonl`, TensorBoard, and the progress line.

In: a step and its metrics under "/"-separated names. Out: one JSON object per call in OUTPUT_DIR/metrics.jsonl, event
files under OUTPUT_DIR/tensorboard, one line of text. Continuing a run drops what lies beyond the resumed step. What
happens to these files ends no run: lines that cannot be written wait until they can, event files miss the time between.
"""

import contextlib
import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dapo.report.console import warn
from dapo.state.durable import write_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
MAX_WAITING = 500  # lines that wait for a disk; of more, the oldest are lost


class MetricsLogger:
    """Appends metrics; what a call writes is in the files when it returns, so that a killed run has all its lines."""

    def __init__(self, output_dir: Path, *, tensorboard: bool) -> None:
        """Opens the files in output_dir, which must exist. tensorboard: also write event files."""
        self.output_dir = output_dir
        self._path = output_dir / METRICS
        self._file: IO[bytes] | None = self._path.open("ab", buffering=0)
        self._waiting: deque[str] = deque()  # lines that are not, or not whole, in the file
        self._torn = 0  # bytes of the first of them that are
        self._told = False  # of lines that wait
        self._event_folder = output_dir / TENSORBOARD if tensorboard else None
        self._events: SummaryWriter | None = None
        self._events_failed = self._events_told = False
        self._purge_step: int | None = None  # TensorBoard drops what earlier event files have from this step on

    def resume(self, step: int, due: Sequence[str] = ()) -> None:
        """Forgets every line after `step`, the step that the run continues from; at 0, all of them. Call before `log`.

        A line that a crash cut short is forgotten too. due: `unwritten` of the run before, of which those that are not
        in the file follow.
        """
        waiting = [*due, *self._waiting]
        kept: list[str] = []
        try:
            before = self._path.read_text(encoding="utf-8")
            kept = _up_to(step, before.splitlines())
            after = "".join([f"{line}\n" for line in kept])
            if after != before:
                self._close_file()
                write_text(self._path, after)
            self._waiting.clear()
            self._torn = 0
        except (OSError, UnicodeDecodeError) as error:
            warn(f"{self._path} keeps what it has after step {step}: {error}")
        for line in dict.fromkeys(_up_to(step, waiting)):
            if line not in kept and line not in self._waiting:
                self._append(line)
        self._close_events()
        self._purge_step = step + 1 if step else 0
        self._to_events(step, lambda events: None)  # its import takes a second, which no step should wait for

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line, and one scalar per value. What is not finite becomes null, for JSON has no word for it."""
        numbers = {name: float(value) for name, value in values.items()}
        record = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._append(json.dumps({"step": step, **record}))
        self._events_failed = False  # tried again once a line

        def add(events: "SummaryWriter") -> None:
            for name, number in numbers.items():
                events.add_scalar(name, number, step)

        self._to_events(step, add)

    def text(self, step: int, tag: str, text: str) -> None:
        """Writes a sample text, shown by TensorBoard as Markdown; without TensorBoard, nothing."""
        self._to_events(step, lambda events: events.add_text(tag, text.encode("utf-8", "replace").decode(), step))

    def unwritten(self) -> tuple[str, ...]:
        """Returns the lines that could not be written yet."""
        return tuple(self._waiting)

    def close(self) -> None:
        """Closes the files; may be called twice."""
        self._close_file()
        self._close_events()

    def _append(self, line: str) -> None:
        """Writes the lines that wait and this one, as far as that is possible."""
        if len(self._waiting) == MAX_WAITING:
            del self._waiting[1]  # the first one may be in the file by half
        self._waiting.append(line)
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            while self._waiting:
                data = f"{self._waiting[0]}\n".encode()
                while self._torn < len(data):
                    self._torn += self._file.write(data[self._torn :])
                self._waiting.popleft()
                self._torn = 0
            self._told = False
        except OSError as error:
            if not self._told:
                warn(f"{self._path} cannot be written to ({error}); up to {MAX_WAITING} lines wait until it can")
            self._told = True

    def _to_events(self, step: int, write: "Callable[[SummaryWriter], None]") -> None:
        """Lets `write` add to the event files. Where that fails, what `step` has is lost there, and what follows goes
        to another file."""
        if self._event_folder is None or self._events_failed:
            return
        try:
            if self._events is None:
                from torch.utils.tensorboard import SummaryWriter

                # A queue for all values of a step: at its default of 10, each of them waits for the writing thread.
                self._events = SummaryWriter(self._event_folder, purge_step=self._purge_step, max_queue=1000)
                self._purge_step = None
            write(self._events)
            self._events.flush()
            self._events_told = False
        except Exception as error:  # whatever the writing thread of TensorBoard met
            if not self._events_told:
                warn(f"TensorBoard files under {self._event_folder} miss steps from {step} on: {error}")
            self._events_failed = self._events_told = True
            self._close_events()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _close_events(self) -> None:
        if self._events is not None:
            with contextlib.suppress(Exception):  # told already, or the end of the run
                self._events.close()
            self._events = None


def evaluated(output_dir: Path, step: int) -> bool:
    """Returns whether metrics.jsonl has the evaluation of `step`."""
    path = output_dir / METRICS
    lines = read_metrics(path) if path.is_file() else []
    return any(line["step"] == step and "eval/accuracy" in line for line in lines)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics.jsonl, null as NaN; a last line still being written is left out."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) >= 0]
    return [{name: math.nan if value is None else value for name, value in record.items()} for record in records]


def _step_of(line: str) -> int:
    """Returns -1 for a line that is no record."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return -1
    return step if isinstance(step, int) else -1


def _up_to(step: int, lines: Sequence[str]) -> list[str]:
    """Returns the lines that a run which goes on from `step` keeps: at 0 none."""
    return [line for line in lines if 0 <= _step_of(line) <= step] if step else []


def progress_line(step: int, total_steps: int, metrics: Mapping[str, float]) -> str:
    """Returns one line for a person, of the metrics that are there.

    >>> progress_line(12, 110, {"rollout/accuracy": 0.41, "rollout/response_length_mean": 3100.0, "perf/step_s": 1.9})
    'step 12/110 · acc 0.41 · len 3.1k · 1.9 s · ETA 3m'
    """
    parts = [f"step {step}/{total_steps}"]
    if "buffer/drawn" in metrics:
        parts.append(_groups(metrics))
    if "rollout/accuracy" in metrics:
        parts.append(f"acc {metrics['rollout/accuracy']:.2f}")
    if "rollout/response_length_mean" in metrics:
        parts.append(f"len {_short(metrics['rollout/response_length_mean'])}")
    if metrics.get("batch/staleness_mean", 0.0) > 0:
        parts.append(f"staleness {metrics['batch/staleness_mean']:.1f}")
    if "actor/loss" in metrics:
        parts.append(f"loss {metrics['actor/loss']:.3f}")
    if "perf/step_s" in metrics:
        seconds = metrics["perf/step_s"]
        parts += [f"{seconds:.1f} s", f"ETA {_duration(seconds * (total_steps - step))}"]
    return " · ".join(parts)


def _groups(metrics: Mapping[str, float]) -> str:
    rest = [("all_wrong", "all-0"), ("all_correct", "all-1"), ("unscorable", "unscorable")]
    counts = [(int(metrics.get(f"buffer/{name}", 0)), label) for name, label in rest]
    # Unscorable groups are the exception: shown when there are any, so that they catch the eye.
    dropped = ", ".join(f"{count} {label}" for count, label in counts if count or label != "unscorable")
    return f"groups {int(metrics.get('buffer/mixed', 0))}/{int(metrics['buffer/drawn'])} mixed ({dropped})"


def _short(number: float) -> str:
    return f"{number:.0f}" if number < 999.5 else f"{number / 1000:.1f}k"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    if hours == 0:
        return f"{minutes}m"
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"
