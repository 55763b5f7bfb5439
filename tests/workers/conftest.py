"""The file of a reward function, once per test module that asks for it."""

import pytest

from tests.support.rewards.reward_programs import CANARIES, PROGRAM


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A function that does what a response tells it to, with known answers."""
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(PROGRAM + CANARIES)
    return str(file)
