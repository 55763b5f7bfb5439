"""Writes what a run reports: `metrics.jsonl`, its sinks, the sample store (`dapo.report.store`), and the progress line.
Each call of `log` writes one JSON object to OUTPUT_DIR/metrics.jsonl and the same to every sink. Resuming a run drops
what lies after the resumed step. A failure of these files never ends a run: lines that cannot be written wait in
memory; sinks and store lose what falls in between."""

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from dapo.ground.console import warn
from dapo.ground.durable import write_text
from dapo.ground.table import duration, short
from dapo.ground.watchdog import waiting
from dapo.report.sinks.sink import Guarded, Sink
from dapo.report.store.samples import SampleStore
from dapo.types import Collected, Group

METRICS = "metrics.jsonl"
SEPARATOR = " · "  # of the parts of a line
EXAMPLE, EXAMPLE_LINES = 1000, 20  # letters and lines of a text that `example` shows
BUFFER_BYTES = 1 << 23  # of lines that wait; later ones are lost


class MetricsLogger:
    """Appends metrics. The data of a call is in the files when it returns, so that a killed run has all its lines."""

    def __init__(self, output_dir: Path, sinks: Sequence[Sink] = (), store: SampleStore | None = None) -> None:
        """Opens the file in output_dir, which must exist. store: for groups and events, and a copy of the rest."""
        self.output_dir = output_dir
        self._path = output_dir / METRICS
        self._file: IO[bytes] | None = self._opened()
        self._waiting: list[str] = []  # lines that are not completely in the file; `_file` still holds their bytes
        self._sinks = [Guarded(sink) for sink in sinks]
        self._store = store

    def resume(self, step: int, due: Sequence[str] = ()) -> None:
        """Removes every line after `step`, from which the run resumes, and any partial line. Call before `log`. due:
        `unwritten` of the previous run; those missing from the file are appended."""
        waiting = [*due, *self._waiting]
        kept: list[str] = []
        try:
            self._close_file()
            before = self._path.read_text(encoding="utf-8", errors="replace")
            kept = _up_to(step, before.splitlines())
            after = "".join([f"{line}\n" for line in kept])
            if after != before:
                write_text(self._path, after)
        except OSError as error:
            warn(f"{self._path} keeps what it has after step {step}: {error}")
        self._waiting.clear()
        for line in dict.fromkeys(_up_to(step, waiting)):
            if line not in kept:
                self._append(line)
        for sink in self._sinks:
            sink.begin(step)
        if self._store is not None:
            self._store.resume(step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line, and one scalar per value. A non-finite value becomes null, as JSON cannot represent it."""
        numbers = {name: float(value) for name, value in values.items()}
        record = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._append(json.dumps({"step": step, **record}))
        for sink in self._sinks:
            sink.next_line()
            sink.give(step, lambda sink: sink.scalars(step, numbers))
        if self._store is not None:
            self._store.metrics(step, record)

    def histogram(self, step: int, name: str, values: Sequence[float]) -> None:
        if len(values):
            for sink in self._sinks:
                sink.give(step, lambda sink: sink.histogram(step, name, values))

    def text(self, step: int, tag: str, text: str) -> None:
        for sink in self._sinks:
            sink.give(step, lambda sink: sink.text(step, tag, text))

    def groups(self, step: int, collected: Collected) -> None:
        if self._store is not None:
            self._store.step(step, collected)

    def evaluation(self, step: int, name: str, groups: Sequence[Group]) -> None:
        if self._store is not None:
            self._store.evaluation(step, name, groups)

    def event(self, kind: str, message: str) -> None:
        """Stores an event; kinds: see the table `events` in `dapo.report.store.schema`."""
        if self._store is not None:
            self._store.event(kind, message)

    def flush(self) -> None:
        """Waits a bounded time until the groups of the steps so far are on disk, as a checkpoint assumes."""
        if self._store is not None:
            self._store.flush()

    def unwritten(self) -> tuple[str, ...]:
        return tuple(self._waiting)

    def close(self) -> None:
        """Closes the files; may be called twice."""
        self._close_file()
        for sink in self._sinks:
            sink.close()
        if self._store is not None:
            self._store.close()

    def _append(self, line: str) -> None:
        """Writes the waiting lines and this one; what cannot be written keeps waiting."""
        first = not self._waiting
        self._waiting.append(line)
        try:
            with waiting(f"{self._path}, to which lines of metrics are written"):
                new = [line]
                if self._file is None:
                    self._file, new = self._opened(), self._waiting
                self._file.write("".join(f"{each}\n" for each in new).encode())
                self._file.flush()
            self._waiting.clear()
        except OSError as error:
            if first:
                warn(f"{self._path} cannot be written to ({error}); its lines wait until it can")

    def _opened(self) -> IO[bytes]:
        """Opens the file for appending, after completing a partial last line with a newline."""
        file = self._path.open("a+b", buffering=BUFFER_BYTES)
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        return file

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # told already
                file.close()


def evaluated(output_dir: Path, step: int) -> bool:
    path = output_dir / METRICS
    lines = read_metrics(path) if path.is_file() else []
    return any(line["step"] == step and "eval/accuracy" in line for line in lines)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics.jsonl, null as NaN, without partial lines."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records = [json.loads(line) for line in lines if _step_of(line) >= 0]
    return [{name: math.nan if value is None else value for name, value in record.items()} for record in records]


def _step_of(line: str) -> int:
    """Returns the step of a line; -1 if it is not a record."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return -1
    return step if isinstance(step, int) else -1


def _up_to(step: int, lines: Sequence[str]) -> list[str]:
    """Returns the lines that a run resumed from `step` keeps; none at 0."""
    return [line for line in lines if 0 <= _step_of(line) <= step] if step else []


def progress_line(step: int, total_steps: int, metrics: Mapping[str, float], *, repeated: int = 0) -> str:
    """Returns one line from the available metrics. repeated: number of repeated warnings that were not printed.

    >>> progress_line(12, 110, {"rollout/accuracy": 0.41, "rollout/response_length_mean": 3100.0, "perf/step_s": 1.9})
    'step 12/110 · acc 0.41 · len 3.1k · 1.9 s · ETA 3m'
    """
    parts = [f"step {step}/{total_steps}"]
    if "buffer/drawn" in metrics:
        parts.append(_groups(metrics))
    if "rollout/accuracy" in metrics:
        parts.append(f"acc {metrics['rollout/accuracy']:.2f}")
    if "rollout/response_length_mean" in metrics:
        parts.append(f"len {short(metrics['rollout/response_length_mean'])}")
    if metrics.get("batch/staleness_mean", 0.0) > 0:
        parts.append(f"staleness {metrics['batch/staleness_mean']:.1f}")
    if "actor/loss" in metrics:
        parts.append(f"loss {metrics['actor/loss']:.3f}")
    if "perf/step_s" in metrics:
        seconds = metrics["perf/step_s"]
        parts += [f"{seconds:.1f} s", f"ETA {duration(seconds * (total_steps - step))}"]
    if repeated:
        parts.append(f"{repeated} warning{'s' * (repeated > 1)} repeated")
    return SEPARATOR.join(parts)


def _groups(metrics: Mapping[str, float]) -> str:
    rest = [("all_wrong", "all-0"), ("all_correct", "all-1"), ("unscorable", "unscorable")]
    counts = [(int(metrics.get(f"buffer/{name}", 0)), label) for name, label in rest]
    # Unscorable groups are the exception: they are shown only if there are any.
    dropped = ", ".join(f"{count} {label}" for count, label in counts if count or label != "unscorable")
    return f"groups {int(metrics.get('buffer/mixed', 0))}/{int(metrics['buffer/drawn'])} mixed ({dropped})"


def example(group: Group) -> str:
    """Returns a prompt as the model gets it, one answer, and its score, for the beginning of a run."""
    prompt, response, score = group.draw.prompt, group.responses[0], group.scores[0]
    verdict = f"accuracy {score.accuracy:g}, reward {score.reward:g}"
    verdict += f", {score.failure}" if score.failure else ""
    verdict += f", read as {_cut(score.prediction, 80)!r}" if score.prediction else ""
    return "\n".join(
        [
            f"a prompt as the model gets it, {len(prompt.token_ids)} tokens:",
            _quoted(prompt.text),
            f"one of its {len(group.responses)} answers, {response.num_sampled} tokens ({response.finish_reason}):",
            _quoted(response.text),
            f"its score: {verdict}; the reference answer: {_cut(prompt.ground_truth, 80)!r}",
        ]
    )


def _quoted(text: str) -> str:
    lines = _cut(text, EXAMPLE).splitlines()
    if len(lines) > EXAMPLE_LINES:
        lines = [*lines[: EXAMPLE_LINES // 2], "…", *lines[-EXAMPLE_LINES // 2 :]]
    return "\n".join(f"  | {line}" for line in lines)


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters // 2]} … {text[-letters // 2 :]}"
