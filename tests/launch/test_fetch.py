"""launch/fetch.py against a hub on loopback that breaks connections: commits, checksums, resuming, overrides."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dapo.config.compose import compose
from dapo.config.paths import checked_data

ROOT = Path(__file__).resolve().parents[2]
SHA = "a" * 40
LARGE = bytes(range(256)) * 400
REPOS = {
    "models/Qwen/Qwen2.5-32B": {"config.json": b'{"a": 1}', "model.safetensors": LARGE, "pytorch_model.bin": b"pickle"},
    "datasets/BytedTsinghua-SIA/DAPO-Math-17k": {"data/train.parquet": b"rows"},
    "datasets/BytedTsinghua-SIA/AIME-2024": {"data/test.parquet": b"held out"},
}
RUN = "+experiment=dapo_qwen32b"
MODEL = (RUN, "data.train_files=[pkg://dapo.tiny/data/train.parquet]", "data.val_files=[]")


class Hub(ThreadingHTTPServer):
    """Serves REPOS. asked: names, with the byte that a download began at; cut: bytes that a large file breaks after."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, int]] = []
        self.cut: int | None = None
        self.swapped: dict[str, bytes] = {}


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].lstrip("/")
        if path.startswith("api/"):
            repo = re.split("/revision/|/tree/", path.removeprefix("api/"))[0]
            listed = [self.entry(name, body) for name, body in REPOS[repo].items()]
            tree = [{"type": "file", "path": one["rfilename"], "oid": one["blobId"], **one} for one in listed]
            info = {"id": repo.partition("/")[2], "sha": SHA, "siblings": listed}
            self.answer(json.dumps(tree if "/tree/" in path else info).encode())
            return
        repo, _, rest = path.partition("/resolve/")
        name = rest.partition("/")[2]
        body = REPOS[repo if repo.startswith("datasets/") else f"models/{repo}"][name]
        self.file(name, self.server.swapped.get(name, body))

    do_HEAD = do_GET

    @staticmethod
    def entry(name: str, body: bytes) -> dict:
        digest = hashlib.sha256(body).hexdigest()
        blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        found = {"rfilename": name, "size": len(body), "blobId": blob}
        lfs = {"sha256": digest, "size": len(body), "pointerSize": 100, "oid": digest}
        return {**found, "lfs": lfs} if name.endswith("tensors") else found

    def answer(self, body: bytes, status: int = 200, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def file(self, name: str, body: bytes) -> None:
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, "0"])[1])
        headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X_Repo_Commit": SHA}
        if start:
            headers["Content_Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        if self.command != "HEAD":
            self.server.asked.append((name, start))
        cut = self.server.cut if body == LARGE else None
        self.close_connection = cut is not None
        self.answer(body[start:cut], 206 if start else 200, len(body) - start, **headers)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def fetch(hub: Hub, tmp_path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}", "HF_HUB_OFFLINE": "0"}
    base |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, str(ROOT / "launch/fetch.py"), *arguments]
    (tmp_path / "quick").mkdir(exist_ok=True)
    (tmp_path / "quick/sitecustomize.py").write_text(
        "import time\nsleep = time.sleep\ntime.sleep = lambda s: sleep(s / 20)\n"
    )
    env = {**base, "PYTHONPATH": f"{tmp_path}/quick:{ROOT}", **env}
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)


def test_models_and_data_come_whole_are_named_and_can_be_checked(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    judges = [f"{key}=Qwen/Qwen2.5-32B" for key in ("reward.model.path", "reward.judge.engine.path")]
    given = [RUN, "reward.functions=[{path: judge, wrong: 0.0}]", *judges]
    done = fetch(hub, tmp_path, str(folder), *given)
    assert done.returncode == 0, done.stderr
    model = folder / f"Qwen--Qwen2.5-32B@{SHA}"
    assert (model / "model.safetensors").read_bytes() == LARGE and not (model / "pytorch_model.bin").exists()
    *overrides, reward_model, judge = shlex.split(done.stdout.splitlines()[-1])
    assert [reward_model, judge] == [f"reward.model.path={model}", f"reward.judge.engine.path={model}"]
    cfg = compose([RUN, *overrides])
    assert cfg.model.path == str(model)
    assert cfg.data.train_files == [f"{folder}/BytedTsinghua-SIA--DAPO-Math-17k@{SHA}"]
    assert cfg.data.val_files == [f"{folder}/BytedTsinghua-SIA--AIME-2024@{SHA}"]
    assert checked_data(f"{cfg.data.val_files[0]}:test", key="data.val_files") == f"{cfg.data.val_files[0]}:test"
    assert subprocess.run("sha256sum --check --quiet *.sha256", shell=True, cwd=folder).returncode == 0
    before = len(hub.asked)
    assert fetch(hub, tmp_path, str(folder), *given).stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    (model / "config.json").write_text("{}")
    checked = fetch(hub, tmp_path, "--check", str(folder), HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert checked.returncode == 1 and "config.json is not what was fetched" in checked.stderr
    assert len(hub.asked) == before


def test_a_broken_download_goes_on_with_the_file_it_broke_off_in(hub: Hub, tmp_path: Path) -> None:
    hub.cut = 40_000
    broken = fetch(hub, tmp_path, str(tmp_path / "shared"), *MODEL)
    assert broken.returncode == 1 and "the same command goes on from here" in broken.stderr, broken.stderr
    assert not list((tmp_path / "shared").glob("*.sha256"))
    hub.cut, hub.asked = None, []
    assert fetch(hub, tmp_path, str(tmp_path / "shared"), *MODEL).returncode == 0
    assert hub.asked == [("model.safetensors", 0)], "what was whole is not fetched again"


def test_a_file_that_is_not_the_hubs_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.swapped["config.json"] = b'{"a": 2}'
    done = fetch(hub, tmp_path, str(tmp_path / "shared"), *MODEL)
    assert done.returncode == 1 and "config.json: git hash" in done.stderr
    assert not list((tmp_path / "shared").glob("*.sha256")) and not list((tmp_path / "shared").rglob("config.json"))


def test_no_folder_is_a_message(hub: Hub, tmp_path: Path) -> None:
    done = fetch(hub, tmp_path, "--chek", RUN)
    assert done.returncode == 2 and "name a folder" in done.stderr
    assert not hub.asked and [path.name for path in tmp_path.iterdir()] == ["quick"]
