"""`python -m dapo.simulate` as a program."""

import subprocess
import sys
from pathlib import Path

import pytest

from dapo.simulate.__main__ import parser

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


@pytest.mark.parametrize(
    ("option", "said"),
    [
        pytest.param("--rate 0", "argument --rate: 0 must be 0.01 to 1", id="none mixed"),
        pytest.param("--rate 0.5 -1", "argument --rate: -1 must be 0.01 to 1", id="negative"),
        pytest.param("--rate 0.001", "argument --rate: 0.001 must be 0.01 to 1", id="what is simulated as 0.01"),
        pytest.param("--rate 2", "argument --rate: 2 must be 0.01 to 1", id="more than all"),
        pytest.param("--rate nan", "argument --rate: nan must be 0.01 to 1", id="no number"),
        pytest.param("--rate x", "argument --rate: invalid float value: 'x'", id="text"),
        pytest.param("--slots 64 0", "argument --slots: 0 must be at least 1", id="slots"),
        pytest.param("--engines 0", "argument --engines: 0 must be at least 1", id="engines"),
        pytest.param("--batch 0", "argument --batch: 0 must be at least 1", id="batch"),
        pytest.param("--n 1", "argument --n: 1 must be at least 2", id="no group is mixed"),
        pytest.param("--n 2.5", "argument --n: invalid int value: '2.5'", id="half a response"),
        pytest.param("--prompts 0", "argument --prompts: 0 must be at least 1", id="prompts"),
    ],
)
def test_what_would_never_end_or_mean_nothing_is_refused(
    option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(option.split())
    assert ended.value.code == 2 and capsys.readouterr().err.endswith(f"error: {said}\n")


def test_one_step_is_refused_because_the_first_is_not_counted() -> None:
    command = [sys.executable, "-m", "dapo.simulate", "--steps", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "--steps (1) must be at least 2" in done.stderr
