"""`python -m dapo.simulate` as a program."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALLEST = "--rate 0.5 --engines 2 --slots 8 --batch 4 --n 2 --steps 2 --strategies staleness-0 staleness-1"


def test_the_smallest_run_prints_its_table() -> None:
    command = [sys.executable, "-m", "dapo.simulate", *SMALLEST.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.lstrip("| ").startswith("staleness-")]
    assert [row.lstrip("| ").split()[0] for row in rows] == ["staleness-0", "staleness-1"]


def test_one_step_is_refused_because_the_first_is_not_counted() -> None:
    command = [sys.executable, "-m", "dapo.simulate", "--steps", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "--steps (1) must be at least 2" in done.stderr
