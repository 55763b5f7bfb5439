"""Real runs in the two half precisions: ranks and engines round alike to float16 far more often than to bfloat16."""

from pathlib import Path
from statistics import fmean

import pytest

from tests.support.runs import Runs, metrics

pytestmark = [pytest.mark.nightly, pytest.mark.ray, pytest.mark.timeout(1200)]


def test_float16_removes_most_of_the_mismatch_between_engines_and_ranks(runs: Runs, tmp_path: Path) -> None:
    differences = {}
    for dtype in ("bfloat16", "float16"):
        settings = (f"model.dtype={dtype}", "trainer.device=cpu", "weight_sync.max_mean_logprob_diff=1e-2")
        runs.small(tmp_path / dtype, *settings, "trainer.total_steps=3")
        steps = [line for line in metrics(tmp_path / dtype) if "actor/loss" in line]
        assert len(steps) == 3
        differences[dtype] = fmean(line["parity/mean_abs_logprob_diff"] for line in steps)
        for line in steps:
            assert line["parity/non_finite_tokens"] == 0 == line.get("actor/overflowed_steps", 0), dtype
    assert 0 < differences["float16"] < differences["bfloat16"] / 4, differences
