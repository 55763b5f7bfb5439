"""Keeps a Ray cluster that this process starts to this machine and to this run: loopback, a token of its own, files
that nobody else reads.

In: nothing. Out: the environment that Ray and its processes see while the cluster lives. The token is in the
environment alone, which only the same user reads: no file, no command line, no `runtime_env`.
"""

import os
import secrets
import signal
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ray._common.utils import get_default_system_temp_dir
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = "lo"
LONGEST = 107 - len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")  # of Linux for a socket


def session_folder() -> str:
    """Returns where Ray may put its sessions: in a folder of this user's, for Ray lets everyone write to its own. In
    RAY_TMPDIR; else in TMPDIR, or in /tmp where that name is too long.

    Raises ValueError for a RAY_TMPDIR that is too long, and for a folder of somebody else's."""
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
    """Returns whether a cluster of our own gets a token of its own: not where the user has one, or wants none."""
    named = os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH)
    return not named and os.environ.get(MODE, "token") == "token"


@contextmanager
def own_token() -> Iterator[None]:
    """Gives the cluster that is started in the block, and lives in it, a token; afterwards environment and Ray are as
    they were."""
    before = {name: os.environ.get(name) for name in (MODE, TOKEN)}
    if makes_token():
        os.environ.pop(MODE, None)  # Ray sets it itself when it finds none, and only then looks again
        os.environ[TOKEN] = secrets.token_hex(32)
    AuthenticationTokenLoader.instance().reset_cache()  # of a cluster that this process has joined before
    try:
        yield
    finally:
        _put_back(before)
        Config.initialize("")  # first: a thread of Ray's that still ends must not look for a token that is gone
        AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def on_loopback() -> Iterator[None]:
    """Has `ray.init` in the block start a cluster that listens on loopback alone, and whose processes do."""
    before = {name: os.environ.get(name) for name in INTERFACES}
    for name in INTERFACES:
        os.environ.setdefault(name, LOOPBACK)
    # Ray's own switch for it (its default on macOS and Windows) is an environment variable that counts when Ray is
    # imported. `ray.init` replaces an address of loopback that it is given by the machine's.
    clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        _put_back(before)


@contextmanager
def deaf_to_hangups() -> Iterator[None]:
    """Has processes that are started in the block, and theirs, hear nothing of a terminal that closes: the driver does,
    and ends them when it has saved."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _put_back(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
