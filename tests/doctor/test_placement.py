"""What the doctor says of GPUs that a run asks for, on one machine."""

from typing import Any

import pytest

from dapo.config.compose import compose
from dapo.doctor.checked import cluster
from dapo.doctor.machines import ThisMachine
from dapo.doctor.subject import Subject


@pytest.mark.parametrize(
    ("overrides", "gpus", "level", "parts"),
    [
        pytest.param([], 8, "ok", ["8 GPUs asked for, 8 of 8 free on 1 node of 8 GPUs"], id="enough"),
        pytest.param([], 4, "fault", ["asked for 8 GPUs", "has 4", "add 1 node of 4 GPUs"], id="too-few"),
        pytest.param(
            ["--rollout-only", "rollout.num_engines=8"], 8, "ok", ["8 GPUs asked for, 8 of 8 free"], id="half-a-run"
        ),
        pytest.param(
            ["rollout.node_labels={pool: a}"], 8, "fault", ["`rollout.node_labels` (pool=a)", "no labels"], id="labels"
        ),
    ],
)
def test_what_is_asked_is_compared_with_what_is_there(
    overrides: list[str], gpus: int, level: str, parts: list[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(ThisMachine, "gpus", lambda self: gpus)
    subject = Subject(compose(["+experiment=dapo_qwen7b", "trainer.device=cuda", *overrides], plan=True))
    found = cluster.placement(subject, ThisMachine())
    assert found.level == level and not found.found.startswith("placement")
    for part in parts:
        assert part in found.found
