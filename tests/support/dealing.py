"""Decides in which order files go to the processes of pytest-xdist: long ones first, and together what shares a slow
start."""

from collections.abc import Iterable

import pytest
from xdist.scheduler import LoadFileScheduling

# One process takes all files of a group, one after the other: they use the same engines, or the same actor ranks.
GROUPS = {
    "engines": (
        "tests/end_to_end/test_program.py",
        "tests/end_to_end/test_learning.py",
        "tests/end_to_end/faults/test_budget.py",
        "tests/tools/replay/test_again.py",
        "tests/end_to_end/test_lora.py",
        "tests/end_to_end/test_mixture.py",
        "tests/tools/bench/test_commands.py",
    ),
    "the undisturbed run": (
        "tests/end_to_end/faults/test_faults.py",
        "tests/end_to_end/test_turns.py",
        "tests/end_to_end/faults/test_soak.py",
        "tests/end_to_end/faults/test_saves.py",
        "tests/end_to_end/test_own_loss.py",
        "tests/end_to_end/test_experts.py",  # with other engines
    ),
    "two engines": (
        "tests/workers/test_rollout.py",
        "tests/workers/turns/test_calls.py",
        "tests/workers/engines/test_put_down.py",
        "tests/workers/engines/test_lost_engines.py",  # ends them
    ),
    "ranks that fail": (
        "tests/workers/actor_faults/test_restarts.py",
        "tests/workers/actor_faults/test_refusals.py",
        "tests/workers/actor_faults/test_files.py",
    ),
    "ranks": (
        "tests/workers/training/test_parity.py",
        "tests/workers/training/test_fsdp.py",
        "tests/workers/training/test_lora.py",
        "tests/workers/test_actor.py",
        "tests/workers/test_async_saves.py",
        "tests/workers/training/test_scaling.py",
        "tests/tools/plan/test_measured.py",
    ),
}
LONGEST = (  # beside the groups
    "tests/workers/engines/test_speculation.py",
    "tests/end_to_end/faults/test_endings.py",
    "tests/tools/ablation/test_ablation.py",
)
BUSY = (  # keep all cores busy, or must not be kept from one: never side by side
    "tests/rewards/test_code.py",
    "tests/rewards/test_hostile.py",
    "tests/sandbox/test_sandbox.py",
)
GROUP_OF = {file: name for name, files in GROUPS.items() for file in files} | dict.fromkeys(BUSY, "busy cores")
ORDER = [*(file for files in GROUPS.values() for file in files), *LONGEST]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def group_of(nodeid: str) -> str:
    """The name of the group that a test's file belongs to, its own where that is none."""
    return GROUP_OF.get(file_of(nodeid), file_of(nodeid))


def long_ones_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Groups, the longest files, other files that start processes (`ray`), the rest; within a file nothing moves."""
    items = list(items)
    starting = {file_of(item.nodeid) for item in items if item.get_closest_marker("ray")}
    place = {file: number for number, file in enumerate(ORDER)}

    def key(item: pytest.Item) -> tuple[int, bool, str]:
        file = file_of(item.nodeid)
        return place.get(file, len(place)), file not in starting, file

    return sorted(items, key=key)


class GroupedFiles(LoadFileScheduling):
    """Deals out whole files, or whole groups of them, in the order of collection."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        config.option.loadscopereorder = False  # by the number of tests, which says little about their seconds
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
