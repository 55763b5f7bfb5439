"""The benchmark of scoring: its answers are ordinary ones, and a short run gives figures."""

import pytest

from dapo.tools.bench.__main__ import main


def test_a_short_run_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rewards", "--responses", "200", "--children", "2"])
    head, names, _, row, _ = capsys.readouterr().out.splitlines()
    assert head.startswith("200 responses of 2000 characters, ")
    cells = dict(zip(names.split(" | "), row.split(" | "), strict=True))
    assert cells["children"] == "2"
    assert all(float(cells[name]) > 0 for name in ("verdicts/s", "verdicts/s per core", "p50 ms", "bare calls/s"))
