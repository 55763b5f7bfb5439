"""Whole runs with a rollout function: one turn changes no bit, two turns train."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.outcomes import RUN, outcome
from tests.support.runs import Runs, metrics

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]

SHORT = (*RUN, "trainer.total_steps=2")
TWICE = """
from dapo.turns.protocol import Trajectory


async def twice(prompt, generate, sampling):
    first = await generate(max_tokens=3)
    second = await generate(generate.tokenizer(" ", add_special_tokens=False)["input_ids"])
    return Trajectory(text=first.text + " " + second.text)
"""


def test_a_function_of_one_turn_gives_the_same_bits(
    runs: Runs, undisturbed: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    function = ("rollout.function.path=one_turn", "rollout.function.num_workers=1")
    assert outcome(runs.small(tmp_path / "run", *RUN, *function)) == undisturbed


def test_two_turns_train(runs: Runs, tmp_path: Path) -> None:
    """Evaluation included; actors and engines agree on every sampled token, or the run would stop."""
    (tmp_path / "my.py").write_text(TWICE)
    function = (f"rollout.function.path={tmp_path / 'my.py'}", "rollout.function.name=twice")
    lines = metrics(runs.small(tmp_path / "run", *SHORT, *function, "rollout.function.num_workers=1"))
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["actor/grad_norm"] > 0 and line["parity/mean_abs_logprob_diff"] < 1e-4
        assert "reward/failed_rollout" not in line and 1 < line["rollout/turns_mean"] <= 2
