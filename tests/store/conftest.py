"""Fixtures of this folder's tests."""

import pytest

from tests.support.store.writers import Told


@pytest.fixture
def told() -> Told:
    return Told()
