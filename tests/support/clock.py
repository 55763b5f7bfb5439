"""A clock that a test moves."""

import math

import pytest

from dapo.ground import clock as clock_module
from dapo.ground import console, watchdog
from dapo.sampling import stream as traffic_module


class Clock:
    """Stands for `time` where the trainer's parts take it from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (clock_module, traffic_module, console, watchdog):
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(console, "_printed_at", -math.inf)  # the tests before have printed, by another clock

    def monotonic(self) -> float:
        return self.now
