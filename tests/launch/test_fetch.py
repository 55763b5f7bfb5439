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


class Hub(ThreadingHTTPServer):
    """Serves REPOS. asked: names, with the byte that a download began at; cut: bytes that a large file breaks after."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, int]] = []
        self.cut: int | None = None
        self.swapped: dict[str, bytes] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].lstrip("/")
        if path.startswith("api/"):
            repo, _, rest = re.sub(r"/(revision|tree)/", "\n", path.removeprefix("api/"), count=1).partition("\n")
            files = REPOS[repo]
            listed = [self.entry(name, body) for name, body in files.items()]
            tree = [{"type": "file", "path": one["rfilename"], "oid": one["blobId"], **one} for one in listed]
            self.answer(
                json.dumps(
                    tree if "/tree/" in path else {"id": repo.partition("/")[2], "sha": SHA, "siblings": listed}
                ).encode()
            )
            return
        repo, _, rest = path.partition("/resolve/")
        name = rest.partition("/")[2]
        body = REPOS[repo if repo.startswith("datasets/") else f"models/{repo}"][name]
        self.file(name, self.server.swapped.get(name, body))

    do_HEAD = do_GET

    @staticmethod
    def entry(name: str, body: bytes) -> dict:
        lfs = {
            "sha256": hashlib.sha256(body).hexdigest(),
            "size": len(body),
            "pointerSize": 100,
            "oid": hashlib.sha256(body).hexdigest(),
        }
        blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        return {
            "rfilename": name,
            "size": len(body),
            "blobId": blob,
            **({"lfs": lfs} if name.endswith("tensors") else {}),
        }

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def file(self, name: str, body: bytes) -> None:
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, "0"])[1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.asked.append((name, start))
        if self.server.cut is not None and body == LARGE:
            self.wfile.write(body[start : self.server.cut])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body[start:])


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def fetch(hub: Hub, tmp_path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    base |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, str(ROOT / "launch/fetch.py"), *arguments]
    return subprocess.run(command, env=base, cwd=tmp_path, capture_output=True, text=True, timeout=300)


def test_a_model_and_its_data_come_whole_and_are_named(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    done = fetch(hub, tmp_path, str(folder), "+experiment=dapo_qwen32b")
    assert done.returncode == 0, done.stderr
    model = folder / f"Qwen--Qwen2.5-32B@{SHA}"
    assert (model / "model.safetensors").read_bytes() == LARGE and not (model / "pytorch_model.bin").exists()
    overrides = shlex.split(done.stdout.splitlines()[-1])
    cfg = compose(["+experiment=dapo_qwen32b", *overrides])
    assert cfg.model.path == str(model)
    assert cfg.data.train_files == [f"{folder}/BytedTsinghua-SIA--DAPO-Math-17k@{SHA}"]
    assert cfg.data.val_files == [f"{folder}/BytedTsinghua-SIA--AIME-2024@{SHA}"]
    assert checked_data(f"{cfg.data.val_files[0]}:test", key="data.val_files") == f"{cfg.data.val_files[0]}:test"
    assert subprocess.run("sha256sum --check --quiet *.sha256", shell=True, cwd=folder).returncode == 0
    # Once more: nothing is downloaded; and without the hub every file can be checked.
    before = len(hub.asked)
    assert (
        fetch(hub, tmp_path, str(folder), "+experiment=dapo_qwen32b").stdout.splitlines()[-1]
        == done.stdout.splitlines()[-1]
    )
    assert len(hub.asked) == before
    (model / "config.json").write_text("{}")
    checked = fetch(hub, tmp_path, "--check", str(folder), HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert checked.returncode == 1 and "config.json is not what was fetched" in checked.stderr
    assert len(hub.asked) == before


def test_models_that_judge_come_too(hub: Hub, tmp_path: Path) -> None:
    names = ["reward.model.path=Qwen/Qwen2.5-32B", "reward.judge.engine.path=Qwen/Qwen2.5-32B"]
    names.append("reward.functions=[{path: judge, wrong: 0.0}]")
    own = [
        "model.path=pkg://dapo.tiny/base",
        "data.train_files=[pkg://dapo.tiny/data/train.parquet]",
        "data.val_files=[]",
    ]
    done = fetch(hub, tmp_path, str(tmp_path / "shared"), "+experiment=dapo_tiny", *own, *names)
    assert done.returncode == 0, done.stderr
    overrides = shlex.split(done.stdout.splitlines()[-1])
    model = tmp_path / f"shared/Qwen--Qwen2.5-32B@{SHA}"
    assert overrides[-2:] == [f"reward.model.path={model}", f"reward.judge.engine.path={model}"] and model.is_dir()


def test_a_broken_download_goes_on_with_the_file_it_broke_off_in(hub: Hub, tmp_path: Path) -> None:
    hub.cut = 40_000
    data = "data.train_files=[pkg://dapo.tiny/data/train.parquet]"
    arguments = (str(tmp_path / "shared"), "+experiment=dapo_qwen32b", data, "data.val_files=[]")
    broken = fetch(hub, tmp_path, *arguments)
    assert broken.returncode == 1 and "the same command goes on from here" in broken.stderr, broken.stderr
    assert not list((tmp_path / "shared").glob("*.sha256"))
    hub.cut, hub.asked = None, []
    assert fetch(hub, tmp_path, *arguments).returncode == 0
    assert hub.asked == [("model.safetensors", 0)], "what was whole is not fetched again"


def test_a_file_that_is_not_the_hubs_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.swapped["config.json"] = b'{"a": 2}'
    done = fetch(hub, tmp_path, str(tmp_path / "shared"), "+experiment=dapo_qwen32b")
    assert done.returncode == 1 and "config.json: git hash" in done.stderr
    assert not list((tmp_path / "shared").glob("*.sha256")) and not list((tmp_path / "shared").rglob("config.json"))


@pytest.mark.parametrize("arguments", [["+experiment=dapo_qwen32b"], ["--chek", "+experiment=dapo_qwen32b"], ["-x"]])
def test_no_folder_is_a_message(arguments: list[str], hub: Hub, tmp_path: Path) -> None:
    done = fetch(hub, tmp_path, *arguments)
    assert done.returncode == 2 and "name a folder" in done.stderr
    assert not hub.asked and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["shared", "--help"]])
def test_help(arguments: list[str], hub: Hub, tmp_path: Path) -> None:
    done = fetch(hub, tmp_path, *arguments)
    assert done.returncode == 0 and "python launch/fetch.py FOLDER" in done.stdout, done.stderr
    assert not hub.asked and not [*tmp_path.iterdir()]
