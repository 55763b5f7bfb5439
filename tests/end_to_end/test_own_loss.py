"""Whole runs with functions of a person's own: the built-in ones given as files change no bit, the example trains."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import dapo
from tests.support.outcomes import RUN, outcome
from tests.support.runs import Runs, metrics

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]

SOURCES = Path(dapo.__file__).parent


BUILT_IN = {
    "algorithm.policy_loss": ("loss.py", "policy_loss"),
    "algorithm.advantage.function": ("advantage.py", "group_advantages"),
    "algorithm.token_weights": ("loss.py", "token_weights"),
    "filter_groups.function": ("sampling/outcome.py", "classify"),
}


def test_the_built_in_functions_given_as_files_give_the_same_bits(
    runs: Runs, undisturbed: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Weights, answers and metrics, over two epochs of two mini-batches on two ranks."""
    for file, _ in BUILT_IN.values():
        shutil.copyfile(SOURCES / file, tmp_path / Path(file).name)
    given = [f"{key}={tmp_path / Path(file).name}:{name}" for key, (file, name) in BUILT_IN.items()]
    found = runs.small(tmp_path / "run", *RUN, *given)
    assert outcome(found) == undisturbed
    assert max(line["actor/clip_fraction"] for line in metrics(found)) > 0


def test_the_example_of_the_readme_trains(runs: Runs, tmp_path: Path) -> None:
    example = f"algorithm.policy_loss={SOURCES / 'own' / 'soft_gate.py'}:soft_gate"
    others = ("algorithm.advantage.function=reinforce_plus_plus", "algorithm.entropy_top_share=0.2")
    lines = metrics(runs.small(tmp_path / "run", *RUN, "trainer.total_steps=2", example, *others))
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["actor/grad_norm"] > 0 and line["actor/optimizer_steps"] == 4
        assert line["actor/clip_fraction"] == 0, "it has no bound"
