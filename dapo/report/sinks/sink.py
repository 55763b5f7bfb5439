"""Interface of metric sinks, and a wrapper that keeps a failing sink from ending a run."""

import contextlib
from collections.abc import Callable, Mapping, Sequence

from dapo.ground.console import warn


class Sink:
    """Receives what a run reports; this base ignores it. Any call may raise: then `close` is called, and `begin` before
    a retry. name: for messages."""

    name: str

    def begin(self, step: int) -> None:
        """Opens the sink for what comes after `step`; later steps of an earlier process are void."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Receives numbers, also non-finite ones."""

    def histogram(self, step: int, name: str, values: Sequence[float]) -> None:
        """Receives a sample of at least one number."""

    def text(self, step: int, tag: str, text: str) -> None:
        """Receives Markdown."""

    def close(self) -> None:
        """Flushes and closes; may be called twice."""


class Guarded:
    """Forwards to a sink. After a failure it warns once, skips the rest of the step and reopens the sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._step = 0  # after which the sink begins, or that it last received
        self._open = self._failed = self._told = False

    def begin(self, step: int) -> None:
        """Opens the sink at once: its import takes a second, which should not delay a step."""
        self.close()
        self._step, self._failed = step, False
        self.give(step, lambda sink: None)

    def next_line(self) -> None:
        """Allows a retry of a failed sink."""
        self._failed = False

    def give(self, step: int, write: Callable[[Sink], None]) -> None:
        """Calls `write` with the sink, unless it failed earlier in this step."""
        if self._failed:
            return
        try:
            if not self._open:
                self._sink.begin(self._step)
                self._open = True
            write(self._sink)
            self._step, self._told = step, False
        except Exception as error:  # of a disk, a server or a writing thread
            if not self._told:
                warn(f"{self._sink.name} misses what is reported from step {step} on: {error}")
            self._failed = self._told = True
            self._step = step
            self.close()

    def close(self) -> None:
        """Closes the sink; may be called twice."""
        if self._open:
            with contextlib.suppress(Exception):  # reported already, or the run ends
                self._sink.close()
            self._open = False
