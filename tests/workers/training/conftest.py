"""Two tiny models, and one rank in the test's process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.plain_reference import make_config, make_model, rank_here


@pytest.fixture(scope="session")
def tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its output head is not the embedding."""
    return make_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def rank(model_dir: Path) -> Iterator[Any]:
    with rank_here(make_config(model_dir, num_workers=1)) as worker:
        yield worker
