"""Restricts a Ray cluster that this process starts to this machine and this run: loopback only, its own token, and
private files. The token is only in the environment, which only the same user can read: not in a file, command line or
`runtime_env`."""

import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_default_system_temp_dir
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = "lo"
LONGEST = 107 - len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")  # Linux's limit for sockets


def session_folder() -> str:
    """Returns a folder for Ray's sessions inside a folder private to this user, because Ray makes its own
    world-writable. It is in RAY_TMPDIR, else in TMPDIR, or in /tmp if that path is too long.

    Raises ValueError for a RAY_TMPDIR that is too long, and for a folder that belongs to another user.
    """
    name = f"dapo-{os.getuid()}"
    place = Path(get_default_system_temp_dir())
    if (length := len(os.fsencode(place / name / "ray"))) > LONGEST:
        if "RAY_TMPDIR" in os.environ:
            raise ValueError(
                f"RAY_TMPDIR ({place}) is {length - LONGEST} bytes too long for the names of Ray's sockets in it; name "
                "another folder there"
            )
        place = Path("/tmp")
    own = place / name
    found = str(own / "ray")
    place.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        own.mkdir(mode=0o700)
    there = own.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid():
        raise ValueError(f"{own} is no folder of yours: remove it, or set RAY_TMPDIR to another place")
    own.chmod(0o700)
    return found


def makes_token() -> bool:
    """Whether a cluster that we start gets its own token: not if the user has set one, or disabled tokens."""
    named = os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH)
    return not named and os.environ.get(MODE, "token") == "token"


@contextmanager
def own_token() -> Iterator[None]:
    """Gives the cluster started in the block a token. The cluster must end in the block, after which environment and
    Ray are restored."""
    before = {name: os.environ.get(name) for name in (MODE, TOKEN)}
    if makes_token():
        os.environ.pop(MODE, None)  # Ray sets it itself if unset, and only then looks again
        os.environ[TOKEN] = secrets.token_hex(32)
    AuthenticationTokenLoader.instance().reset_cache()  # drops the token of a cluster that this process joined before
    try:
        yield
    finally:
        _put_back(before)
        Config.initialize("")  # first, because a Ray thread that is still ending must not look for a removed token
        AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def on_loopback() -> Iterator[None]:
    """Makes `ray.init` in the block start a cluster whose processes listen only on loopback."""
    before = {name: os.environ.get(name) for name in INTERFACES}
    for name in INTERFACES:
        os.environ.setdefault(name, LOOPBACK)
    # Ray's own switch for this (its default on macOS and Windows) is an environment variable that is read when Ray is
    # imported. `ray.init` would replace a loopback address by the machine's.
    clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        _put_back(before)


@contextmanager
def in_own_groups() -> Iterator[None]:
    """Makes Ray start its processes in the block in process groups of their own. What a closing terminal or `timeout`
    sends to the whole group is for the driver, which ends them when it has saved."""
    services: Any = ray._private.services
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _put_back(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
