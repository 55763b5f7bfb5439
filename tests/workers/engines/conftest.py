"""The event loop in which the engines of a module live."""

import asyncio
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    runner = asyncio.Runner()
    yield runner
    runner.close()
