"""Writes what a run reports: `metrics.jsonl`, TensorBoard, and the progress line.

In: a step and its metrics under "/"-separated names. Out: one JSON object per call in OUTPUT_DIR/metrics.jsonl, event
files under OUTPUT_DIR/tensorboard, one line of text. Continuing a run drops what lies beyond the resumed step.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.state.durable import write_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class MetricsLogger:
    """Appends metrics; what a call writes is in the files when it returns, so that a killed run has all its lines."""

    def __init__(self, output_dir: Path, *, tensorboard: bool) -> None:
        """Opens the files in output_dir, which must exist. tensorboard: also write event files."""
        self._path = output_dir / METRICS
        self._file = self._path.open("a", encoding="utf-8")
        self._event_folder = output_dir / TENSORBOARD if tensorboard else None
        self._events: SummaryWriter | None = None
        self._purge_step: int | None = None  # TensorBoard drops what earlier event files have from this step on

    def resume(self, step: int) -> None:
        """Forgets every line after `step`, the step that the run continues from; at 0, all of them. Call before `log`.

        A line that a crash cut short is forgotten too.
        """
        before = self._path.read_text(encoding="utf-8")
        kept = [line + "\n" for line in before.splitlines() if 0 <= _step_of(line) <= step] if step else []
        after = "".join(kept)
        if after != before:
            self._file.close()
            write_text(self._path, after)
            self._file = self._path.open("a", encoding="utf-8")
        self._purge_step = step + 1 if step else 0
        self._event_writer()  # its import takes a second, which no step should wait for

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line, and one scalar per value. What is not finite becomes null, for JSON has no word for it."""
        numbers = {name: float(value) for name, value in values.items()}
        record = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._file.write(json.dumps({"step": step, **record}) + "\n")
        self._file.flush()
        if (events := self._event_writer()) is not None:
            for name, number in numbers.items():
                events.add_scalar(name, number, step)
            events.flush()

    def text(self, step: int, tag: str, text: str) -> None:
        """Writes a sample text, shown by TensorBoard as Markdown; without TensorBoard, nothing."""
        if (events := self._event_writer()) is not None:
            events.add_text(tag, text.encode("utf-8", "replace").decode(), step)
            events.flush()

    def close(self) -> None:
        """Closes the files; may be called twice."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def _event_writer(self) -> "SummaryWriter | None":
        if self._events is None and self._event_folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            # A queue for all values of a step: at its default of 10, each of them waits for the writing thread.
            self._events = SummaryWriter(self._event_folder, purge_step=self._purge_step, max_queue=1000)
        return self._events


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
