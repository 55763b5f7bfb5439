"""`python -m dapo.simulate` as a program."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALLEST = "--rate 0.5 --engines 2 --slots 8 --batch 4 --n 2 --steps 2 --strategies staleness-0 staleness-1"


def test_the_smallest_run_prints_its_table() -> None:
    command = [sys.executable, "-m", "dapo.simulate", *SMALLEST.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.lstrip("| ").startswith("staleness-")]
    assert [row.lstrip("| ").split()[0] for row in rows] == ["staleness-0", "staleness-1"]


@pytest.mark.parametrize(
    ("table", "rates", "lines"), [("bound", "0.28 0.5 0.7 0.9", 4), ("layouts", "0.28 0.5 0.9", 5 * 3)]
)
def test_the_smallest_run_of_a_table(table: str, rates: str, lines: int) -> None:
    size = ["--engines", "2", "--slots", "8", "--batch", "4", "--n", "2", "--steps", "3"]
    command = [sys.executable, "-m", "dapo.simulate", "--table", table, "--rate", *rates.split(), *size]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    head, _, *rows = done.stdout.splitlines()
    assert len(rows) == lines and {row.count("|") for row in [head, *rows]} == {head.count("|")}


def test_one_step_is_refused_because_the_first_is_not_counted() -> None:
    command = [sys.executable, "-m", "dapo.simulate", "--steps", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "--steps (1) must be at least 2" in done.stderr
