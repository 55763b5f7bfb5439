"""The benchmark of the sandbox: its programs are right or wrong as they say, and a short run gives figures."""

import json

import pytest

from dapo.bench.__main__ import main
from dapo.bench.code import short_solutions


def test_about_half_of_the_programs_are_right() -> None:
    truths = [json.loads(item.ground_truth) for item in short_solutions(400)]
    right = [int(t["outputs"][0]) == sum(map(int, t["inputs"][0].split())) for t in truths]
    assert 0.4 < sum(right) / len(right) < 0.6


def test_a_short_run_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["code", "--programs", "20", "--children", "2"])
    head, names, _, row, _ = capsys.readouterr().out.splitlines()
    right = [int(t["outputs"][0]) == sum(map(int, t["inputs"][0].split())) for t in map(_truth, short_solutions(20))]
    assert head == f"20 programs, {sum(right) / 20:.0%} right"
    cells = dict(zip(names.split(" | "), row.split(" | "), strict=True))
    assert all(float(cells[name]) > 0 for name in ("programs/s", "programs/s per core", "p50 ms"))


def test_too_few_programs_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"^dapo.bench: `--programs` \(10\) must be at least 20"):
        main(["code", "--programs", "10"])


def _truth(item):
    return json.loads(item.ground_truth)
