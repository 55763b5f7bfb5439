"""Writes the phases of all steps as a Chrome trace, OUTPUT_DIR/trace.json, for https://ui.perfetto.dev. The format
allows the closing bracket of the list to be missing, so the file of a killed run is valid."""

import json
import time
from pathlib import Path

from dapo.ground.console import warn

TRACE = "trace.json"


class Trace:
    """Appends intervals of phases, one track per phase. A write error ends the trace, not the run."""

    def __init__(self, output_dir: Path) -> None:
        self._path = output_dir / TRACE
        self._tracks: dict[str, int] = {}
        self._off = False

    def __call__(self, phase: str, began: float, ended: float) -> None:
        """Writes an interval. began, ended: `time.monotonic()`."""
        if self._off:
            return
        now = time.time() - time.monotonic()
        lines = []
        if phase not in self._tracks:
            self._tracks[phase] = len(self._tracks)
            lines.append({"ph": "M", "name": "thread_name", **self._track(phase), "args": {"name": phase}})
        at = {"ts": round(1e6 * (began + now)), "dur": round(1e6 * (ended - began))}
        lines.append({"ph": "X", "name": phase, **self._track(phase), **at})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(("" if file.tell() else "[\n") + "".join(f"{json.dumps(line)},\n" for line in lines))
        except OSError as error:
            self._off = True
            warn(f"{self._path} cannot be written to, and gets no more phases: {error}")

    def _track(self, phase: str) -> dict[str, int]:
        return {"pid": 1, "tid": self._tracks[phase]}
