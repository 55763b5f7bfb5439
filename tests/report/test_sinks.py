"""The real clients of W&B and MLflow, without a network, hold what metrics.jsonl holds; Prometheus has a gauge each."""

import json
import math
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ray.util.metrics import Gauge

from dapo.config.compose import compose
from dapo.config.schema import Config
from dapo.report.log import MetricsLogger
from dapo.report.sinks import ml_flow, weights_and_biases
from dapo.report.sinks.choice import sinks_of
from dapo.report.sinks.prometheus import prometheus_name
from tests.support.report.reference import NAMES, PLACEHOLDER

WRITTEN_S = 60.0
DASHBOARD = json.loads((Path(__file__).resolve().parents[2] / "launch/grafana.json").read_text(encoding="utf-8"))
FIRST = {step: {"actor/loss": 0.1 * step, "eval/pass@4": 1 / (step + 1)} for step in range(4)}
LATER = {step: {"actor/loss": 0.1 * step, "actor/entropy": math.nan} for step in (4, 5)}


def run(output_dir: Path, lines: Mapping[int, Mapping[str, float]], resume: int, *to: str) -> Config:
    """Reports as a run that begins after step `resume`, and ends."""
    cfg = compose([f"trainer.output_dir={output_dir}", "logging.tensorboard=false", *to], "dapo_tiny")
    logger = MetricsLogger(output_dir, sinks_of(cfg, output_dir))
    logger.resume(resume)
    for step, values in lines.items():
        logger.log(step, values)
        logger.histogram(step, "rollout/lengths", [1.0, 2.0, 5.0])
        logger.text(step, "sample/0", "1 < 2 & <script>")
    logger.close()
    return cfg


def logged(output_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    return lines


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


def records(output_dir: Path) -> list[Any]:
    """What the client of W&B wrote to disk, over all starts of the run in their order."""
    from wandb.proto import wandb_internal_pb2 as proto

    deadline = time.monotonic() + WRITTEN_S
    every: list[Any] = []
    for path in sorted(output_dir.glob("wandb/offline-run-*/run-*.wandb")):  # the second of its start is in the name
        found: list[Any] = []
        while not any(record.WhichOneof("record_type") == "exit" for record in found):  # its process writes on its own
            assert time.monotonic() < deadline, f"{path} has no end"
            time.sleep(0.1)
            found = [proto.Record.FromString(data) for data in stored(path.read_bytes())]
        every += found
    return every


def test_wandb_offline_holds_the_numbers_of_metrics_jsonl(tmp_path: Path) -> None:
    to = ("logging.wandb.project=test", "logging.wandb.mode=offline")
    run(tmp_path, FIRST, 0, *to)
    cfg = run(tmp_path, LATER, 3, *to)
    steps: dict[int, dict[str, Any]] = {}
    every = records(tmp_path)
    for record in every:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            numbers = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            steps.setdefault(numbers["_step"], {}).update(numbers)
    lines = logged(tmp_path)
    assert list(steps) == [0, 1, 2, 3, 4, 5]
    for line in lines:
        shown = steps[line.pop("step")]
        assert shown.items() >= {name: value for name, value in line.items() if value is not None}.items()
        assert shown["rollout/lengths/_type"] == "histogram" and shown["sample/0/_type"] == "html-file"
    runs = [record.run for record in every if record.WhichOneof("record_type") == "run"]
    assert len({one.run_id for one in runs}) == 1, "both starts are one run"
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["rollout.n"] == cfg.rollout.n and config["trainer.output_dir"] == str(tmp_path)
    (page, *_) = tmp_path.glob("wandb/offline-run-*/files/media/html/sample/*.html")
    assert "1 &lt; 2 &amp; &lt;script&gt;" in page.read_text()


@pytest.fixture
def mlflow_on_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ml_flow.LIMITS:
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_mlflow_holds_the_numbers_of_metrics_jsonl(tmp_path: Path, mlflow_on_files: None) -> None:
    from mlflow.tracking import MlflowClient

    out, uri = tmp_path / "run", f"file:{tmp_path / 'store'}"
    out.mkdir()
    to = (f"logging.mlflow.tracking_uri='{uri}'", "logging.mlflow.experiment=sums")
    run(out, FIRST, 0, *to)
    cfg = run(out, LATER, 3, *to)
    client = MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED"), "both starts are one run, and it has ended"
    lines = logged(out)
    for name in ("actor/loss", "actor/entropy", "eval/pass@4"):
        there = {one.step: one.value for one in client.get_metric_history(found.info.run_id, ml_flow.mlflow_name(name))}
        here = {line["step"]: line[name] for line in lines if name in line}
        assert there.keys() == here.keys() and here
        assert all(math.isnan(there[step]) if here[step] is None else there[step] == here[step] for step in here)
    assert found.data.params["rollout.n"] == str(cfg.rollout.n)
    assert len(found.data.params) > ml_flow.MOST_PARAMETERS, "more than a server takes at once"
    (text,) = (tmp_path / "store").glob("**/sample/0/step_000005.md")
    assert text.read_text() == "1 < 2 & <script>"


def test_a_server_that_answers_nothing_holds_no_step_up(
    tmp_path: Path, mlflow_on_files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        cfg = compose([f"trainer.output_dir={tmp_path}", "logging.tensorboard=false"], "dapo_tiny")
        cfg.logging.mlflow = {"tracking_uri": f"http://127.0.0.1:{server.getsockname()[1]}"}
        logger = MetricsLogger(tmp_path, sinks_of(cfg, tmp_path))
        logger.resume(0)
        began = time.monotonic()
        logger.log(1, {"actor/loss": 1.0})
        assert time.monotonic() - began < 1, "a request has a second, and is made twice"
        deadline = time.monotonic() + 60
        while not (said := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.1)
            logger.log(2, {"actor/loss": 1.0})
        assert said.count("MLflow misses what is reported from step 2 on") == 1
        logger.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.parametrize(
    ("sink", "arguments", "said"),
    [
        (weights_and_biases, {}, ""),
        (weights_and_biases, {"mode": "offline"}, ""),
        (
            weights_and_biases,
            {"mode": "offline", "id": "x"},
            "`logging.wandb.id` is no argument",
        ),
        (weights_and_biases, {"project": "dapo"}, "logging.wandb.mode=offline"),
        (
            weights_and_biases,
            {"projekt": "a"},
            "that can be set; did you mean `project`?",
        ),
        (weights_and_biases, {"xyzzy": "a", "mode": "offline"}, "it takes allow_val_change, "),
        (ml_flow, {}, ""),
        (ml_flow, {"tracking_uri": "http://tracking:5000"}, ""),
        (ml_flow, {"experiment": "dapo"}, "names no server: set logging.mlflow.tracking_uri"),
        (ml_flow, {"uri": "http://tracking:5000"}, "`logging.mlflow.uri` (http://tracking:5000)"),
    ],
)
def test_what_cannot_work_is_said_before_the_start(
    sink: Any, arguments: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    found = sink.problem(arguments)
    assert said in found and bool(found) == bool(said)


class Recorded(Gauge):
    """A gauge of Ray that also keeps what it is set to; without a cluster nobody takes it."""

    values: dict[str, float] = {}

    def _record(self, value, tags=None):
        super()._record(value, tags)
        self.values[self.info["name"]] = value


def test_each_number_has_a_gauge_with_its_newest_value(tmp_path: Path) -> None:
    cfg = compose(["logging.prometheus=true", "logging.tensorboard=false"], "dapo_tiny")
    assert sinks_of(cfg, tmp_path) == [], "there is no Ray"
    [sink] = sinks_of(cfg, tmp_path, Recorded)
    sink.begin(0)
    sink.scalars(1, {"actor/loss": 0.5, "perf/step_s": 2.0})
    sink.scalars(2, {"actor/loss": math.nan, "reward/my function": 1.0, "eval/pass@4": 0.25})
    sink.close()
    sink.begin(2)
    sink.scalars(3, {"perf/step_s": 3.0})
    found = Recorded.values
    assert found.pop("dapo_actor_loss") != 0.5
    assert found == {"dapo_step": 3, "dapo_perf_step_s": 3.0, "dapo_reward_my_function": 1.0, "dapo_eval_pass_4": 0.25}


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    assert len({prometheus_name(name) for name in NAMES}) == len(NAMES)
    known = "|".join(
        "".join(r"(?:\w|\[0-9\]\+)+" if PLACEHOLDER.fullmatch(part) else prometheus_name(part)[5:] for part in parts)
        for parts in (re.split(r"(\{\w+\})", name) for name in [*NAMES, "step"])
    )
    targets = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    asked = [found for text in targets for found in re.findall(r"ray_dapo_((?:\w|\[0-9\]\+|\(\.\+_\)\?)+)", text)]
    assert len(asked) == len(targets) > 40 and all('run=~"$run"' in text for text in targets)
    asked = [name.replace("(.+_)?", part) for name in asked for part in ("", "set_")]
    assert [name for name in asked if not re.fullmatch(known, name)] == []
