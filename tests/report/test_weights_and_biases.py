"""The real client of Weights & Biases, without a network: its run directory holds what metrics.jsonl holds."""

import json
import math
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dapo.config.compose import compose
from dapo.config.schema import Config
from dapo.report.sinks import weights_and_biases
from tests.support.report.reported import report_to_sinks

WRITTEN_S = 60.0
OFFLINE = ("logging.tensorboard=false", "logging.wandb.project=test", "logging.wandb.mode=offline")


def stored(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, which is a log in LevelDB's format: after a header of 7 bytes, blocks of 32 KiB of
    pieces, each a checksum (4 bytes), a length (2) and whether it is whole (1), the first (2), a middle (3) or the last
    one (4) of its record."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def records(output_dir: Path) -> Iterator[Any]:
    """What the client wrote to disk, over all starts of the run in their order."""
    from wandb.proto import wandb_internal_pb2 as proto

    deadline = time.monotonic() + WRITTEN_S
    for path in sorted(output_dir.glob("wandb/offline-run-*/run-*.wandb")):  # the second of its start is in the name
        found: list[Any] = []
        while not any(record.WhichOneof("record_type") == "exit" for record in found):  # its process writes on its own
            assert time.monotonic() < deadline, f"{path} has no end"
            time.sleep(0.1)
            found = [proto.Record.FromString(data) for data in stored(path.read_bytes())]
        yield from found


def history(output_dir: Path) -> dict[int, dict[str, Any]]:
    """Step -> its values by name."""
    steps: dict[int, dict[str, Any]] = {}
    for record in records(output_dir):
        if record.WhichOneof("record_type") == "history":
            values = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            numbers = {name: json.loads(value) for name, value in values.items()}
            steps.setdefault(numbers["_step"], {}).update(numbers)
    return steps


def run(output_dir: Path, lines: Mapping[int, Mapping[str, float]], resume: int = 0) -> Config:
    cfg = compose(["+experiment=dapo_tiny", f"trainer.output_dir={output_dir}", *OFFLINE])
    report_to_sinks(cfg, output_dir, lines, resume)
    return cfg


def test_offline_it_holds_the_numbers_of_metrics_jsonl(tmp_path: Path) -> None:
    run(tmp_path, {step: {"actor/loss": 0.1 * step, "eval/accuracy": 1 / (step + 1)} for step in range(4)})
    cfg = run(tmp_path, {step: {"actor/loss": 0.1 * step, "actor/entropy": math.nan} for step in (4, 5)}, resume=3)
    steps = history(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(steps) == [0, 1, 2, 3, 4, 5]
    for line in lines:
        shown = steps[line.pop("step")]
        assert {name: shown[name] for name in line if line[name] is not None} == {
            name: value for name, value in line.items() if value is not None
        }
        assert shown["rollout/lengths/_type"] == "histogram" and shown["sample/0/_type"] == "html-file"
    runs = [record.run for record in records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert len({one.run_id for one in runs}) == 1, "both starts are one run"
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["rollout.n"] == cfg.rollout.n and config["trainer.output_dir"] == str(tmp_path)
    (page, *_) = tmp_path.glob("wandb/offline-run-*/files/media/html/sample/*.html")
    assert "1 &lt; 2 &amp; &lt;script&gt;" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param({}, "", id="off"),
        pytest.param({"mode": "offline"}, "", id="offline"),
        pytest.param({"mode": "offline", "id": "x"}, "`logging.wandb.id` (x) is set by dapo itself", id="own"),
        pytest.param({"settings": {"api_key": "s3cr3t"}}, "({'api_key': '(redacted)'}) is set by dapo", id="secret"),
        pytest.param({"project": "dapo"}, "logging.wandb.mode=offline", id="no key"),
    ],
)
def test_what_cannot_work_is_said_before_the_start(arguments, said, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    found = weights_and_biases.problem(arguments)
    assert said in found and bool(found) == bool(said)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install wandb" in weights_and_biases.problem({"project": "dapo"})
