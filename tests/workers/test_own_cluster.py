"""What a Ray cluster of our own changes in this process, and puts back; that it works is seen in whole runs."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray._private import services

from dapo.workers import cluster, own_cluster, within
from dapo.workers.own_cluster import INTERFACES, MODE, TOKEN, TOKEN_PATH, on_loopback, own_token

OURS = (MODE, TOKEN, TOKEN_PATH, *INTERFACES)


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours is set, and the Ray of this process, which other tests use, is not touched."""
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cluster, "_own", ExitStack())
    monkeypatch.setattr(cluster, "_left", threading.Event())
    monkeypatch.setattr(cluster, "_ended", threading.Event())
    monkeypatch.setattr(cluster, "end_with_raylet", lambda *given: None)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    for name in ("AuthenticationTokenLoader", "Config"):
        monkeypatch.setattr(own_cluster, name, MagicMock())


def own() -> dict[str, str]:
    return {name: os.environ[name] for name in OURS if name in os.environ}


GIVEN = [
    ({}, True),
    ({MODE: "token"}, True),
    ({MODE: "disabled"}, False),
    ({TOKEN: "0" * 64}, False),
    ({MODE: "token", TOKEN_PATH: "/mine"}, False),
    ({INTERFACES[0]: "eth1"}, True),
]


@pytest.mark.parametrize(("given", "replaced"), GIVEN, ids=str)
def test_a_token_of_its_own_unless_the_user_has_said_which(
    given: dict[str, str], replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen, tokens = [], set()
    for _ in range(2):
        with pytest.raises(KeyError), own_token():
            with on_loopback():
                seen.append(own())
                os.environ[MODE] = "token"  # as Ray does
            assert [name for name in INTERFACES if name in os.environ and name not in given] == []
            raise KeyError
        assert own() == given
        if replaced:
            tokens.add(seen[-1].pop(TOKEN))
    kept = {name: value for name, value in given.items() if name != MODE or not replaced}
    assert seen == [dict.fromkeys(INTERFACES, "lo") | kept] * 2
    assert len(tokens) == 2 * replaced and all(re.fullmatch("[0-9a-f]{64}", each) for each in tokens)


def test_a_cluster_that_does_not_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ray._private import ray_constants

    def fails(**how: object) -> None:
        assert TOKEN in os.environ and not ray_constants.ENABLE_RAY_CLUSTER
        raise OSError("no memory")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cluster.ray, "init", fails)
    with pytest.raises(OSError, match="no memory"):
        cluster.connect("local", worker_logs=False)
    assert own() == {} and ray_constants.ENABLE_RAY_CLUSTER and [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265"])
def test_an_address_of_rays_client_or_job_server_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[object] = []
    monkeypatch.setattr(cluster.ray, "init", lambda **words: joined.append(words))
    monkeypatch.setenv("RAY_ADDRESS", address)
    for written in (address, ""):
        with pytest.raises(ValueError, match=rf"{address}\) is .*ray job submit"):
            cluster.connect(written, worker_logs=False)
    assert not joined


def test_a_cluster_that_is_joined_is_left_to_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = dict(os.environ), []
    monkeypatch.setattr(cluster, "_found", lambda target: target)
    monkeypatch.setattr(cluster.ray, "init", lambda **how: seen.append((how["address"], own())))
    cluster.connect("10.0.0.1:6379", worker_logs=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    cluster.connect("", worker_logs=False)
    assert seen == [("10.0.0.1:6379", {}), ("10.0.0.2:6379", {})]
    changed = {name for name in os.environ.keys() | before.keys() if os.environ.get(name) != before.get(name)}
    assert changed <= {"RAY_ADDRESS", "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"}


@pytest.mark.parametrize("what", ["nothing", "a server that is no head", "no port"])
def test_an_address_without_a_head_is_refused_with_its_key(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would try for minutes, and hear no signal."""
    monkeypatch.setattr(cluster.ray, "init", lambda **how: pytest.fail("Ray was asked"))
    monkeypatch.setattr(cluster, "FIND_S", 0.5)
    monkeypatch.setattr(within, "vanish_at_exit", lambda: None)
    monkeypatch.setattr(within, "left_behind", threading.Event())
    monkeypatch.setattr(cluster, "left_behind", within.left_behind)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}" if what != "no port" else "head"
        if what == "nothing":
            server.close()
        with pytest.raises(
            (OSError, ValueError), match=rf"{address} \(`trainer.ray_address`, or RAY_ADDRESS\).*HOST:PORT"
        ):
            cluster.connect(address, worker_logs=False)


def test_a_cluster_that_does_not_end_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its head process stands still."""
    told: list[str] = []
    monkeypatch.setattr(cluster.ray, "init", lambda **how: None)
    monkeypatch.setattr(cluster.ray, "shutdown", threading.Event().wait)
    monkeypatch.setattr(cluster, "LEAVE_S", 0.1)
    monkeypatch.setattr(cluster, "warn", told.append)
    monkeypatch.setattr(within, "vanish_at_exit", lambda: told.append("vanishes"))
    monkeypatch.setattr(within, "left_behind", threading.Event())
    monkeypatch.setattr(cluster, "left_behind", within.left_behind)
    cluster.connect("local", worker_logs=False)
    cluster.leave()
    assert told[0] == "vanishes" and "more than 0.1 s" in told[1]


def test_nobody_else_writes_to_the_files_of_its_sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray lets everyone write to its folder and to those below."""
    started: dict[str, Any] = {}
    monkeypatch.setattr(cluster.ray, "init", lambda **given: started.update(given))
    monkeypatch.setenv("RAY_TMPDIR", str(place := Path(tempfile.mkdtemp(dir="/tmp"))))
    try:
        for _ in range(2):
            cluster.connect("local", worker_logs=False)
            cluster.leave()
            found = Path(started["_temp_dir"])
            assert found.parent.parent == place and found.parent.stat().st_mode & 0o777 == 0o700
            found.parent.chmod(0o755)
        found.parent.rmdir()
        found.parent.symlink_to(tmp_path)
        with pytest.raises(ValueError, match="is no folder of yours.*RAY_TMPDIR"):
            cluster.connect("local", worker_logs=False)
        monkeypatch.setenv("RAY_TMPDIR", str(place / ("long" * 10)))
        with pytest.raises(ValueError, match="RAY_TMPDIR .*too long"):
            cluster.connect("local", worker_logs=False)
        monkeypatch.delenv("RAY_TMPDIR")
        monkeypatch.setenv("TMPDIR", str(place / ("long" * 10)))
        cluster.connect("local", worker_logs=False)
        cluster.leave()
        assert started["_temp_dir"] == f"/tmp/dapo-{os.getuid()}/ray"
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize(
    ("memory", "keeps", "store"),
    [(6 << 30, False, (6 << 30) // 5), (128 << 30, False, 8 << 30), (128 << 30, True, (128 << 30) // 5)],
)
def test_the_object_store_fits_into_the_memory_of_a_container(
    memory: int, keeps: bool, store: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "get_system_memory", lambda: memory)
    started: dict[str, object] = {}
    monkeypatch.setattr(cluster.ray, "init", lambda **given: started.update(given))
    cluster.connect("local", worker_logs=False, keeps=keeps)
    cluster.leave()
    assert started["object_store_memory"] == store


def test_its_processes_leave_what_is_sent_to_the_group_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closing terminal and `timeout` tell all processes of the group; where Ray's end, there is no save."""
    told: list[str] = []

    def init(**how: object) -> None:
        script = "import os; print(os.getpgrp() == os.getpid())"
        process = services.ConsolePopen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        told.append(process.communicate(timeout=60)[0])

    monkeypatch.setattr(cluster.ray, "init", init)
    before = services.ConsolePopen
    cluster.connect("local", worker_logs=False)
    cluster.leave()
    assert told == ["True\n"] and services.ConsolePopen is before
