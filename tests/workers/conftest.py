"""Two engines for all test modules that ask for them, and the file of a reward function."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.rewards.reward_programs import CANARIES, PROGRAM

if TYPE_CHECKING:  # it loads Ray and torch
    from tests.support.engines.two import TwoEngines


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.Runner]:
    """The event loop in which engines live."""
    runner = asyncio.Runner()
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def two_engines(
    ray_cluster: None, loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator["TwoEngines"]:
    from tests.support.engines.two import TwoEngines
    from tests.support.kept import end_with_the_group

    made = TwoEngines(loop, tmp_path_factory.mktemp("two") / "model")
    end_with_the_group(made.close)
    yield made
    made.close()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A function that does what a response tells it to, with known answers."""
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(PROGRAM + CANARIES)
    return str(file)
