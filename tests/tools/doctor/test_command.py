"""`python -m dapo.doctor` as a program: lines, JSON, exit code, and nothing found where nothing is wrong."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dapo.config.compose import compose
from dapo.main_ppo import launch
from dapo.tools.doctor import __main__ as command
from dapo.tools.doctor import limits
from dapo.tools.doctor.checks import CHECKS, PARITY, Outcome, check_machine
from dapo.tools.doctor.subject import FAULT, WARNING, Finding


def run(*overrides: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "dapo.doctor", "+experiment=dapo_tiny", *overrides]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


@pytest.mark.nightly
def test_a_healthy_machine_has_nothing(tmp_path: Path) -> None:
    done = run(f"trainer.output_dir={tmp_path / 'out'}", "--json")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    said = json.loads(done.stdout)
    assert [check for check in said["checks"] if check["level"] != "ok"] == []
    assert (said["faults"], said["warnings"]) == (0, 0)
    assert [check["name"] for check in said["checks"]] == ["configuration", *(check.name for check in CHECKS)]
    assert [*tmp_path.iterdir()] == []


def test_lines_and_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for path, asked in ((f"{tmp_path / chr(27)}[31m", ["--json"]), (f"{tmp_path}/none", [])):
        monkeypatch.setattr(sys, "argv", ["doctor", "+experiment=dapo_tiny", f"model.path={path}", *asked])
        with pytest.raises(SystemExit, match="1"):
            command.main()
        said = capsys.readouterr()
        assert said.err == "dapo: 1 fault\n"
        if asked:
            assert json.loads(said.out)["faults"] == 1
        else:
            [line] = said.out.splitlines()
            assert line.startswith("fault    configuration    `model.path` (") and "did you mean" not in line


@pytest.mark.parametrize("level", [FAULT, WARNING])
def test_the_process_becomes_the_run_where_there_is_no_fault(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(command, "_look", lambda arguments: [Outcome("plan", Finding(level, "x", "y"))])
    monkeypatch.setattr(command.os, "execv", lambda program, line: became.append([program, *line]))
    monkeypatch.setattr(sys, "argv", ["doctor", "--run", "+experiment=dapo_tiny", "trainer.seed=1"])
    with pytest.raises(SystemExit) if level == FAULT else nullcontext():
        command.main()
    line = [sys.executable, sys.executable, "-m", "dapo.main_ppo", "+experiment=dapo_tiny", "trainer.seed=1"]
    assert became == ([] if level == FAULT else [line])


def test_engine_and_rank_are_compared_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[list[str]] = []
    monkeypatch.setattr(command, "diagnose", lambda subject, machines, checks: looked.append([*checks]) or iter(()))
    for asked in ([], ["--parity"]):
        monkeypatch.setattr(sys, "argv", ["doctor", *asked, "+experiment=dapo_tiny"])
        command.main()
    assert looked == [[*CHECKS], [*CHECKS, PARITY]]


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    done = run("trainer.ray_address=127.0.0.1:1")
    assert done.returncode == 1
    assert "no cluster at 127.0.0.1:1" in done.stdout and "Connection refused" in done.stdout


def test_what_a_file_says_does_not_reach_the_terminal() -> None:
    outcome = Outcome("prompts", Finding(FAULT, "\x1b[2J '9\u202e'\nok all", "none"))
    assert command.line(outcome).split() == ["fault", "prompts", "[2J", "'9", "'", "ok", "all;", "none"]


def test_each_run_looks_at_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults end it, all at once; a warning is told."""
    told: list[str] = []
    cfg = compose([f"trainer.output_dir={tmp_path / 'out'}"], "dapo_tiny")
    check_machine(cfg, told.append)
    assert told == []
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20, free=1 << 20))
    with pytest.raises(ValueError) as error:
        check_machine(cfg, told.append)
    lines = str(error.value).splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == ["free disk"]
    assert "trainer.preflight=false" in lines[-1]
    assert [line.partition(":")[0] for line in told] == ["shared memory", "temporary disk"] and "--shm-size" in told[0]


def test_a_run_on_a_machine_with_a_fault_ends_before_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20, free=1 << 20))
    with pytest.raises(ValueError, match=r"^free disk: 1.05 MB free(?s:.*)trainer.preflight=false"):
        launch(compose([f"trainer.output_dir={tmp_path / 'out'}"], "dapo_tiny"))
