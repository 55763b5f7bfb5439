"""Whole runs with functions of a person's own: the built-in ones given as files change no bit, nor does a rollout
function of one turn."""

import shutil
from pathlib import Path

import pytest

import dapo
from tests.end_to_end.faults.test_faults import Undisturbed, assert_undisturbed
from tests.support.outcomes import RUN
from tests.support.runs import Runs, metrics

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1500)]

SOURCES = Path(dapo.__file__).parent
BUILT_IN = {
    "algorithm.policy_loss": ("loss.py", "policy_loss"),
    "algorithm.advantage.function": ("advantage.py", "group_advantages"),
    "algorithm.token_weights": ("loss.py", "token_weights"),
    "filter_groups.function": ("algorithm/outcome.py", "classify"),
}


def test_the_built_in_functions_given_as_files_give_the_same_bits(
    runs: Runs, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Weights, answers and metrics, over two epochs of two mini-batches on two ranks."""
    for file, _ in BUILT_IN.values():
        shutil.copyfile(SOURCES / file, tmp_path / Path(file).name)
    given = [f"{key}={tmp_path / Path(file).name}:{name}" for key, (file, name) in BUILT_IN.items()]
    found = runs.small(tmp_path / "run", *RUN, *given)
    assert_undisturbed(found, undisturbed)
    assert max(line["actor/clip_fraction"] for line in metrics(found)) > 0


def test_a_function_of_one_turn_gives_the_same_bits(runs: Runs, undisturbed: Undisturbed, tmp_path: Path) -> None:
    function = ("rollout.function.path=one_turn", "rollout.function.num_workers=1")
    assert_undisturbed(runs.small(tmp_path / "run", *RUN, *function), undisturbed)
