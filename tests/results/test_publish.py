"""The model card of a checkpoint and its push to a hub that is a server of this test."""

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub import ModelCard, constants
from omegaconf import OmegaConf

from dapo.config.compose import compose
from dapo.config.facts.hub import why_not_pushed
from dapo.config.schema import CheckpointConfig, Config
from dapo.results import publish
from dapo.results.card import settings
from dapo.results.publish import published
from dapo.state.changes import changes
from dapo.state.manifest import verify
from dapo.state.run_dir import RunDirectory
from tests.support.results.run_files import step_line
from tests.support.state.claims import claim, write

REPOSITORY, OUTPUT_DIR = "me/adds", "trainer.output_dir"
INPUTS = {
    "model.path": "owner/base@0123abc",
    "data.train_files[0]": "/home/somebody/my data/sums.parquet (10 bytes, 2026-01-01 00:00:00 UTC)",
    "data.val_files[0]": "owner/held-out@4567def:test",
}


class Hub(ThreadingHTTPServer):
    """commits: what each has brought, by file. status: of the answer to a new repository."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.status, self.who = 200, (200, {"name": "me", "orgs": [{"name": "us"}]})
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.answer(*(self.server.who if self.path == "/api/whoami-v2" else (404, {})))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.server.asked.append(json.loads(body))
            self.answer(self.server.status, {"url": f"https://huggingface.co/{REPOSITORY}"})
        elif self.path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            self.answer(200, {"files": [{**one, "shouldIgnore": False} for one in files]})
        elif self.path.endswith("/commit/main"):
            header, *files = (json.loads(line)["value"] for line in body.splitlines())
            self.server.commits.append({header["summary"]: sorted(one["path"] for one in files)})
            commit = f"https://huggingface.co/{REPOSITORY}/commit/0"
            self.answer(200, {"commitUrl": commit, "commitOid": "0", "success": True})
        else:
            self.answer(200, {})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdefghij")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


def tiny(folder: Path, *overrides: str) -> dict[str, Any]:
    return asdict(compose([f"trainer.output_dir={folder}", *overrides], "dapo_tiny"))


def pushing(**checkpoint: Any) -> Config:
    return Config(checkpoint=CheckpointConfig(push_to_hub=REPOSITORY, **checkpoint))


def run_in(folder: Path, *overrides: str) -> RunDirectory:
    run = claim(folder, tiny(folder, *overrides))
    run.record_inputs(INPUTS)
    return run


def lines(folder: Path, *lines: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def saved(run: RunDirectory, step: int) -> None:
    lines(run.path, step_line(step, 0.5))
    write(run.store, step, {"hf/model.safetensors": f"of step {step}"})


def evaluated(step: int, value: float) -> dict[str, Any]:
    interval = {"eval/accuracy_low": value - 0.1, "eval/accuracy_high": value + 0.1}
    return {"step": step, "eval/accuracy": value, **interval}


def test_a_card_tells_what_the_model_is_and_no_folder_or_secret(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def compute_score(*_):\n    return 1\n")
    judge = "{path: judge, kwargs: {url: 'http://10.0.0.1:8000/v1', model: m, api_key: s3cr3t-key}}"
    rewards = f"reward.functions=[{{path: {tmp_path}/mine.py}}, {judge}]"
    run = run_in(
        tmp_path / "adds", rewards, "actor.optim.lr=1e-05", "algorithm.policy_loss=/home/somebody/own/loss.py:mine"
    )
    with published(run, Config(), "dapo_tiny"):
        lines(run.path, evaluated(0, 0.25))
        saved(run, 1)
        first = run.checkpoints / "step_000001" / "hf" / "README.md"
        assert ModelCard.load(first).data.eval_results is None, "its policy is not evaluated so far"
        lines(run.path, evaluated(1, 0.5))
        saved(run, 2)
        (run.path / "curves.png").write_bytes(b"PNG")
    card = ModelCard.load(first)
    assert (card.data.base_model, card.data.datasets) == ("owner/base", ["owner/held-out"])
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    [result] = card.data.eval_results
    assert (result.metric_value, result.dataset_type, result.metric_type) == (0.5, "owner/held-out", "accuracy")
    for words in ("`dapo_tiny`", "sums.parquet (10 bytes", "| `mine.py`, `judge` |", "100 generated", "lr: 1.0e-05"):
        assert words.strip("| ") in card.text, words
    assert "| held-out | 0 | 0.250 (0.150 to 0.350) |\n| held-out | 1 | 0.500 (0.400 to 0.600) |" in card.text
    for secret in ("/home", str(tmp_path), "10.0.0.1", "s3cr3t", "my data"):
        assert secret not in first.read_text(), secret
    newest = run.checkpoints / "step_000002" / "hf"
    assert "](curve.png)" in (newest / "README.md").read_text() and (newest / "curve.png").read_bytes() == b"PNG"
    assert "curve.png" not in card.text and "eval_results" not in (newest / "README.md").read_text()
    for checkpoint in run.checkpoints.glob("step_*"):
        verify(checkpoint)
    run.release()


def test_the_settings_of_a_card_are_the_run(tmp_path: Path) -> None:
    given = tiny(tmp_path, "algorithm.clip_ratio_high=0.3", "trainer.total_steps=7")
    again = OmegaConf.merge(OmegaConf.structured(Config), yaml.safe_load(yaml.safe_dump(settings(given))))
    assert [one.key for one in changes(given, OmegaConf.to_container(again))] == ["checkpoint.every", OUTPUT_DIR]


def test_a_card_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path / "adds")
    monkeypatch.setattr(publish, "write_card", lambda *_, **__: 1 / 0)
    with published(run, Config(), ""):
        saved(run, 1)
    assert "checkpoints are not complete: ZeroDivisionError" in capsys.readouterr().err
    verify(run.checkpoints / "step_000001")
    run.release()


def test_checkpoints_are_pushed_and_the_last_one_at_the_end(tmp_path: Path, hub: Hub) -> None:
    run = run_in(tmp_path / "adds")
    with published(run, pushing(), ""):
        saved(run, 1)
        pushed = threading.Event()
        while not hub.commits and not pushed.wait(0.05):  # beside the run
            pass
        saved(run, 2)
        (run.path / "curves.png").write_bytes(b"PNG")
    assert hub.commits[0] == {"step 1": ["README.md", "model.safetensors"]}
    assert hub.commits[-1] == {"step 2": ["README.md", "curve.png", "model.safetensors"]}
    assert {one["visibility"] for one in hub.asked} == {"private"}
    run.release()


@pytest.mark.parametrize(
    ("status", "timeout_s", "why"), [(403, 60.0, "403"), (200, 0.01, r"not done after `checkpoint.timeout_s`")]
)
def test_a_push_that_fails_is_a_warning_with_the_command_to_repeat_it(
    tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str], status: int, timeout_s: float, why: str
) -> None:
    hub.status = status
    run = run_in(tmp_path / "adds")
    with published(run, pushing(timeout_s=timeout_s), ""):
        saved(run, 1)
    told = capsys.readouterr().err
    assert "step_000001 was not pushed to me/adds: " in told and why in told and not hub.commits
    assert f"by hand: hf upload me/adds {run.checkpoints}/step_000001/hf . --private" in told
    run.release()


def test_a_run_that_is_stopped_waits_for_no_push(
    tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeout` as a push that never ends."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "timeout").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "bin" / "timeout").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    run = run_in(tmp_path / "adds")
    with pytest.raises(KeyboardInterrupt), published(run, pushing(), ""):
        saved(run, 1)
        raise KeyboardInterrupt
    assert "step_000001 is not on the hub; by hand: hf upload me/adds" in capsys.readouterr().out
    run.release()


ME = {"name": "me", "orgs": [{"name": "us"}]}


@pytest.mark.parametrize(
    ("repository", "status", "who", "why"),
    [
        ("me/adds", 200, ME, ""),
        ("us/adds", 200, ME, ""),
        ("they/adds", 200, ME, "the token is that of me, us; give one of these as the owner"),
        ("me/adds", 200, {**ME, "auth": {"accessToken": {"role": "read"}}}, "the token may only read"),
        ("me/adds", 401, {}, "the hub does not know the token"),
        ("me/adds", 503, {}, "503"),
    ],
)
def test_whether_a_push_can_succeed_is_asked_before_a_run(
    hub: Hub, repository: str, status: int, who: dict[str, Any], why: str
) -> None:
    hub.who = (status, who)
    warned: list[str] = []
    refused = why_not_pushed(repository, warned.append)
    assert [why in line for line in filter(None, [refused, *warned])] == ([True] if why else [])
    assert bool(warned) == (status == 503), "which passes"


def test_without_a_token_or_a_network_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert "there is no token; set HF_TOKEN" in why_not_pushed(REPOSITORY, pytest.fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in why_not_pushed(REPOSITORY, pytest.fail)
