"""Shared by all tests: thread counts for two cores, the same generated examples in every run, one Ray per process, and
the order in which files are dealt to processes.
"""

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # it loads Ray
    from tests.support.clock import Clock
    from tests.support.runs import Runs

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Under nohup, or behind a shell's `&`, they are ignored, and so they would be by what tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# What a test says must not depend on chance, nor on how busy the machine is. HYPOTHESIS_PROFILE=default draws new
# examples; `launch/test.sh --all` takes "all".
settings.register_profile("some", derandomize=True, database=None, deadline=None, max_examples=50)
settings.register_profile("all", settings.get_profile("some"), max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "some"))

_shared = False  # whether this process has its Ray


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.support.dealing import long_ones_first

        items[:] = long_ones_first(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # else the files of a group do not follow each other
        from tests.support.dealing import group_of
        from tests.support.kept import enter

        enter(group_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.support.dealing import GroupedFiles

    return GroupedFiles(config, log)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Ray as the program itself starts it, for all tests of a process."""
    from dapo.workers.cluster import connect, leave

    global _shared
    connect("local", worker_logs=False)
    _shared = True
    yield
    _shared = False
    leave()


@pytest.fixture(autouse=True)
def _nobody_ends_it() -> Iterator[None]:
    """Names the test that ends what others share: elsewhere it would show as a failure of theirs."""
    yield
    if _shared:
        import ray

        assert ray.is_initialized(), "this test has ended the Ray of its process"


@pytest.fixture(scope="session")
def runs(ray_cluster: None) -> Iterator["Runs"]:
    """Runs in the test's process."""
    from tests.support.kept import end_with_the_group
    from tests.support.runs import Runs

    made = Runs()
    end_with_the_group(made.rest)
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> "Clock":
    """A clock that the test moves, for what is said while a run goes on."""
    from tests.support.clock import Clock

    return Clock(monkeypatch)


@pytest.fixture
def open_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets a test see its own waits alone, and ends without one. Engines that `runs` keeps stay in the middle of theirs
    while their event loop stands still."""
    from dapo.ground import watchdog

    own: dict[int, watchdog._Wait] = {}
    monkeypatch.setattr(watchdog, "_open", own)
    yield
    assert own == {}
