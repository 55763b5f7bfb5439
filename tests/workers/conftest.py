"""Ray as the program itself starts it, once per test module that asks for it."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    import ray

    from workers.cluster import connect

    connect("local", worker_logs=False)
    yield
    ray.shutdown()
