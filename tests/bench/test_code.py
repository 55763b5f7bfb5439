"""The benchmark of the sandbox: a short run gives figures, and its programs are right or wrong as they say."""

import json

import pytest

from dapo.bench.__main__ import main
from dapo.bench.code import short_solutions


def test_a_short_run_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["code", "--programs", "20", "--children", "2"])
    head, names, _, row, _ = capsys.readouterr().out.splitlines()
    truths = [json.loads(item.ground_truth) for item in short_solutions(20)]
    right = [int(t["outputs"][0]) == sum(map(int, t["inputs"][0].split())) for t in truths]
    assert head == f"20 programs, {sum(right) / 20:.0%} right"
    cells = dict(zip(names.split(" | "), row.split(" | "), strict=True))
    assert all(float(cells[name]) > 0 for name in ("programs/s", "programs/s per core", "p50 ms"))
