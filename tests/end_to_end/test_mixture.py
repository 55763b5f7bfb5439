"""Runs on several sources with a curriculum, end to end: what resumes is the whole run."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.config.compose import compose
from dapo.config.paths import resolve_path
from tests.support.outcomes import outcome
from tests.support.runs import SMALL, TINY, Runs

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1500)]

STEPS = 4
CURRICULUM = ("data.curriculum=weighted", "data.min_weight=0.2")
COURSE = (f"trainer.total_steps={STEPS}", "checkpoint.every=2", "actor.num_workers=1", "eval.every=0")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides of two sources of a few problems of the tiny task each, the second in TRL's columns and with a cap and
    functions of its own; so that a run comes by each problem several times."""
    folder = tmp_path_factory.mktemp("mixture")
    table = pq.read_table(resolve_path("pkg://dapo.tiny/data/train.parquet"))
    pq.write_table(table.slice(0, 6), folder / "sums.parquet")
    rows = table.slice(6, 5).to_pylist()
    plain = [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in rows]
    pq.write_table(pa.Table.from_pylist(plain), folder / "plain.parquet")
    one = f"{{name: sums, files: [{folder}/sums.parquet], weight: 2}}"
    own = "max_response_length: 96, functions: [{path: math}]"
    other = f"{{name: plain, files: [{folder}/plain.parquet], {own}}}"
    return f"data.sources=[{one},{other}]", "data.train_files=[]", *CURRICULUM, *COURSE


@pytest.fixture(scope="module")
def whole(runs: Runs, mixture: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.small(tmp_path_factory.mktemp("whole") / "run", *mixture)


def drawn(output_dir: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "buffer/drawn" in line]


def test_a_run_in_parts_is_the_whole_run(runs: Runs, mixture: tuple[str, ...], whole: Path, tmp_path: Path) -> None:
    for until in (1, 3, STEPS):
        given = [*SMALL, f"trainer.output_dir={tmp_path / 'run'}", "data.val_files=[]", *mixture]
        runs.train(compose(given, TINY), until=until)
    assert outcome(tmp_path / "run") == outcome(whole)


def test_shares_skips_and_functions_are_those_of_the_sources(whole: Path) -> None:
    steps = drawn(whole)
    total = sum(step["buffer/drawn"] for step in steps)
    for name, share in (("sums", 2 / 3), ("plain", 1 / 3)):
        assert abs(sum(step.get(f"source/{name}/drawn", 0) for step in steps) - share * total) <= 2
    assert sum(step["curriculum/skipped"] > 0 for step in steps) > 0, "the test shows nothing"
    assert all("reward/plain:math" in step for step in steps if "source/plain/drawn" in step)
