"""Once per test module that asks for it: Ray as the program itself starts it, and the file of a reward function."""

from collections.abc import Iterator

import pytest

from tests.support.reward_programs import CANARIES, PROGRAM


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    import ray

    from workers.cluster import connect

    connect("local", worker_logs=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A function that does what a response tells it to, with known answers."""
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(PROGRAM + CANARIES)
    return str(file)
