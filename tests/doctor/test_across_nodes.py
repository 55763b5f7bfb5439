"""What is wrong on one of several nodes, whose answers are the test's own: it is told with the node's name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dapo.config.compose import compose
from dapo.doctor.checked import storage
from dapo.doctor.checks import CHECKS, diagnose
from dapo.doctor.finding import FAULT, OK, WARNING
from dapo.doctor.machines import Silent
from dapo.doctor.subject import Subject


class OtherNodes:
    """Three nodes: the second does what is planted."""

    names = ["a", "b", "c"]

    def __init__(self, planted: Callable[..., Any]) -> None:
        self._planted = planted

    def ask(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        return self._planted(call, *args) if name == "b" else call(*args)

    def ask_all(self, call: Callable[..., Any], *args: Any) -> dict[str, Any]:
        return {name: self.ask(name, call, *args) for name in self.names}

    def gpus(self) -> int:
        return 0

    def all_reduce(self, device: str) -> list[Any]:
        return [0.1, Silent("connection refused"), 0.1]


ACROSS = [
    pytest.param("clock", lambda call, *args: call(*args) + 90, FAULT, ["+90.0", "at b", "chrony"], id="clock"),
    pytest.param("clock", lambda call, *args: call(*args) - 5, WARNING, ["-5.0", "at b", "chrony"], id="slow-clock"),
    pytest.param("clock", lambda call, *args: call(*args) + 0.5, OK, ["3 nodes"], id="close-clock"),
    pytest.param(
        "shared directory",
        lambda *_: "gone",
        FAULT,
        ["1 of 3 nodes: b: the driver's file is not there (gone)"],
        id="private",
    ),
    pytest.param(
        "shared directory",
        lambda call, folder, name: (Path(folder) / "token").read_text(),
        FAULT,
        ["b: what this node writes is not there"],
        id="read-only",
    ),
    pytest.param("shared directory", lambda call, *args: call(*args), OK, ["the same on 3 nodes"], id="shared"),
    pytest.param("python", lambda *_: Silent("no answer within 120 s"), FAULT, ["1 of 3 nodes: b", "120 s"], id="dead"),
    pytest.param("all-reduce", lambda *_: None, FAULT, ["gloo, 3 ranks", "connection refused"], id="all-reduce"),
]


@pytest.mark.parametrize(("name", "planted", "level", "parts"), ACROSS)
def test_what_is_wrong_on_another_node_is_told_with_its_name(
    name: str,
    planted: Callable[..., Any],
    level: str,
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage, "SEEN_S", 0.2)
    subject = Subject(compose([f"trainer.output_dir={tmp_path / 'out'}"], "dapo_tiny", plan=True))
    checks = [check for check in CHECKS if check.name == name]
    [outcome] = diagnose(subject, OtherNodes(planted), checks)
    assert outcome.finding.level == level, outcome
    text = f"{outcome.finding.found}; {outcome.finding.remedy}"
    assert [part for part in parts if part not in text] == [], text
    assert not (tmp_path / "out").exists(), "nothing stays behind"
