"""Keeps a Ray cluster that this process starts to this machine and to this run: loopback, and a token of its own.

In: nothing. Out: the environment that Ray and its processes see while the cluster lives. The token is in the
environment alone, which only the same user reads: no file, no command line, no `runtime_env`.
"""

import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = "lo"


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
