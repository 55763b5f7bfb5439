"""The run that others are compared with, once per process."""

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.runs import Runs


@pytest.fixture(scope="session")
def undisturbed(runs: "Runs", tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """Its outcome."""
    from tests.support.outcomes import RUN, outcome

    return outcome(runs.small(tmp_path_factory.mktemp("undisturbed") / "run", *RUN))
