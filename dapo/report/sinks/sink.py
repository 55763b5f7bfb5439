"""Says what a sink of metrics is, and keeps what happens to one from ending a run.

In: scalars, histograms and texts of a step. Out: the same, handed to a sink as long as it takes them.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence

from dapo.report.console import warn


class Sink:
    """Takes what a run reports; here, nothing. Any call may raise; `close` is then called, and `begin` before it is
    tried again. name: for a person."""

    name: str

    def begin(self, step: int) -> None:
        """Opens the sink for what comes after `step`; what an earlier process gave for later steps is void."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Takes numbers, also such as are not finite."""

    def histogram(self, step: int, name: str, values: Sequence[float]) -> None:
        """Takes a sample of numbers, at least one."""

    def text(self, step: int, tag: str, text: str) -> None:
        """Takes Markdown."""

    def close(self) -> None:
        """Flushes and closes; may be called twice."""


class Guarded:
    """Hands on to a sink. One that fails misses the rest of its step, is told of once, and is opened again with the
    next step."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._step = 0  # that the sink is to begin after, or has last been given
        self._open = self._failed = self._told = False

    def begin(self, step: int) -> None:
        """Opens the sink at once: its import takes a second, which no step should wait for."""
        self.close()
        self._step, self._failed = step, False
        self.give(step, lambda sink: None)

    def next_line(self) -> None:
        """Lets a sink that failed be tried again."""
        self._failed = False

    def give(self, step: int, write: Callable[[Sink], None]) -> None:
        """Calls `write` with the sink, unless it failed before in this step."""
        if self._failed:
            return
        try:
            if not self._open:
                self._sink.begin(self._step)
                self._open = True
            write(self._sink)
            self._step, self._told = step, False
        except Exception as error:  # whatever a disk, a server or a writing thread met
            if not self._told:
                warn(f"{self._sink.name} misses what is reported from step {step} on: {error}")
            self._failed = self._told = True
            self._step = step
            self.close()

    def close(self) -> None:
        """Closes the sink; may be called twice."""
        if self._open:
            with contextlib.suppress(Exception):  # told already, or the end of the run
                self._sink.close()
            self._open = False
