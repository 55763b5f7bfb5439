"""`python -m dapo.simulate` as a program."""

import subprocess
import sys
from pathlib import Path

import pytest

from dapo.tools.simulate.__main__ import parser

ROOT = Path(__file__).resolve().parents[3]
SMALLEST = "--rate 0.5 --engines 2 --slots 8 --batch 4 --n 2 --steps 2 --strategies staleness-0 staleness-1"


def simulated(words: str) -> list[str]:
    command = [sys.executable, "-m", "dapo.simulate", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_smallest_run_prints_its_table() -> None:
    rows = [line.lstrip("| ") for line in simulated(SMALLEST) if line.lstrip("| ").startswith("staleness-")]
    assert [row.split()[0] for row in rows] == ["staleness-0", "staleness-1"]


@pytest.mark.parametrize("option", ["--slots 64 0", "--n 1", "--lost 1", "--back-s 0"])
def test_what_means_nothing_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(option.split())
    assert ended.value.code == 2 and f"argument {option.split()[0]}: " in capsys.readouterr().err
