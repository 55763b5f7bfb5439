"""`python -m dapo.plan` as a program."""

import sys

import pytest

from dapo.plan import __main__ as command


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["+experiment=dapo_tiny", "--help"], ["--job", "-h"]])
def test_help(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["dapo.plan", *arguments])
    command.main()
    said = capsys.readouterr()
    assert "python -m dapo.plan [--job] [+experiment=NAME]" in said.out and said.err == ""
