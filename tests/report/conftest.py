"""A clock that the test moves, in the tests of what is said while a run goes on."""

import pytest

from tests.support.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)
