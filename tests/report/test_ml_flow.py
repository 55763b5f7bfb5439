"""The real client of MLflow, on its file store: a run there holds what metrics.jsonl holds."""

import json
import math
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dapo.config.compose import compose
from dapo.config.schema import Config
from dapo.report.log import MetricsLogger
from dapo.report.sinks import ml_flow
from dapo.report.sinks.choice import sinks_of
from tests.support.report.reported import report_to_sinks

NAMES = {"actor/loss", "actor/entropy", "eval/pass@4"}


@pytest.fixture(autouse=True)
def on_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ml_flow.LIMITS:
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def run(output_dir: Path, uri: str, lines: Mapping[int, Mapping[str, float]], resume: int = 0) -> Config:
    to = ["logging.tensorboard=false", f"logging.mlflow.tracking_uri='{uri}'", "logging.mlflow.experiment=sums"]
    cfg = compose(["+experiment=dapo_tiny", f"trainer.output_dir={output_dir}", *to])
    report_to_sinks(cfg, output_dir, lines, resume)
    return cfg


def test_it_holds_the_numbers_of_metrics_jsonl(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    out, uri = tmp_path / "run", f"file:{tmp_path / 'store'}"
    out.mkdir()
    run(out, uri, {step: {"actor/loss": 0.1 * step, "eval/pass@4": 1 / (step + 1)} for step in range(4)})
    cfg = run(out, uri, {step: {"actor/loss": 0.1 * step, "actor/entropy": math.nan} for step in (4, 5)}, resume=3)

    client = MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED"), "both starts are one run, and it has ended"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for name in NAMES:
        there = {one.step: one.value for one in client.get_metric_history(found.info.run_id, ml_flow.mlflow_name(name))}
        here = {line["step"]: line[name] for line in lines if name in line}
        assert there.keys() == here.keys() and here
        assert all(math.isnan(there[step]) if here[step] is None else there[step] == here[step] for step in here)
    assert found.data.params["rollout.n"] == str(cfg.rollout.n)
    assert len(found.data.params) > ml_flow.MOST_PARAMETERS, "more than a server takes at once"
    (text,) = (tmp_path / "store").glob("**/sample/0/step_000005.md")
    assert text.read_text() == "1 < 2 & <script>"


def test_a_server_that_answers_nothing_holds_nobody_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step costs the driver nothing; the end waits until the first request has failed."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        cfg = compose(["+experiment=dapo_tiny", f"trainer.output_dir={tmp_path}", "logging.tensorboard=false"])
        cfg.logging.mlflow = {"tracking_uri": f"http://127.0.0.1:{server.getsockname()[1]}"}
        logger = MetricsLogger(tmp_path, sinks_of(cfg, tmp_path))
        logger.resume(0)
        began = time.monotonic()
        logger.log(1, {"actor/loss": 1.0})
        assert time.monotonic() - began < 1, "a request has a second, and is made twice"
        deadline = time.monotonic() + 60
        while not (said := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.2)
            logger.log(2, {"actor/loss": 1.0})
        assert said.count("MLflow misses what is reported from step 2 on") == 1
        logger.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param({}, "", id="off"),
        pytest.param({"tracking_uri": "http://tracking:5000"}, "", id="server"),
        pytest.param({"experiment": "dapo"}, "names no server: set logging.mlflow.tracking_uri", id="no server"),
        pytest.param({"uri": "http://tracking:5000"}, "`logging.mlflow.uri` (http://tracking:5000)", id="unknown"),
    ],
)
def test_what_cannot_work_is_said_before_the_start(arguments: dict[str, Any], said: str) -> None:
    found = ml_flow.problem(arguments)
    assert said in found and bool(found) == bool(said)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install mlflow-skinny" in ml_flow.problem({"tracking_uri": "http://tracking:5000"})
