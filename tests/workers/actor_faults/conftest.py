"""Fixtures of this folder's tests."""

from pathlib import Path

import pytest

from dapo.types import TrainSequence
from dapo.workers.actor import ActorPool
from tests.support.training.plain_reference import (
    LENGTHS,
    make_config,
    make_model,
    make_sequences,
    start_pool,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="module")
def sequences(model_dir: Path) -> tuple[TrainSequence, ...]:
    return make_sequences(model_dir, LENGTHS)


@pytest.fixture
def pool(model_dir: Path) -> ActorPool:
    """Two ranks in their first state, which a test must leave able to go on."""
    return start_pool(make_config(model_dir, num_workers=2))
