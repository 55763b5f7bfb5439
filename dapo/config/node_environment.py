"""Environment variables of a process that torch, gloo and NCCL read: allocator, and interface of process groups."""

import os
import re
import socket

import psutil

from dapo.config.derived import hands_over_memory
from dapo.config.schema import Config

GLOO, NCCL, NCCL_FAMILY = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch uses the first that is set
REMEDY = "leave expandable_segments out on every node, before Ray starts there"


def expandable_segments() -> str:
    """Describes the problem of expandable segments; empty if this process's environment leaves them off. Another
    process opens such memory with a file descriptor of the rank (pidfd_getfd); containers and Yama forbid that."""
    name = next((each for each in VARIABLES if os.environ.get(each)), VARIABLES[0])
    given = os.environ.get(name, "")
    if not re.search(r"expandable_segments\s*:\s*(true|1)", given, re.IGNORECASE):
        return ""
    return (
        f"{name} ({given}): memory in expandable segments is opened by another process only with the right to trace "
        "the rank, which containers do not give; engines take their weights from such memory (transport ipc)"
    )


def check_allocator(cfg: Config, device: str) -> None:
    """Raises ValueError in a rank whose memory engines could not open. device: the rank's."""
    if device == "cuda" and cfg.trainer.preflight and hands_over_memory(cfg) and (found := expandable_segments()):
        raise ValueError(f"{found}; {REMEDY} (trainer.preflight=false starts the run all the same)")


def sockets_towards(address: str) -> None:
    """Makes gloo, and NCCL for its bootstrap and for TCP, use the interface that reaches `address`. An interface set in
    the environment is kept. By default gloo uses the address of the machine's host name: on Debian and many clouds
    127.0.1.1, which every other machine resolves to itself. NCCL uses the first interface, which the others may not
    reach."""
    mine = [GLOO] if NCCL_FAMILY in os.environ else [GLOO, NCCL]
    unnamed = [name for name in mine if name not in os.environ]
    if unnamed and (found := _interface_towards(address)):
        values = {GLOO: found, NCCL: f"={found}"}  # NCCL treats a name without "=" as a prefix
        os.environ.update({name: values[name] for name in unnamed})


def _interface_towards(address: str) -> str:
    """Returns the name of the interface; empty if the address is unreachable or the name is not known."""
    try:
        [(family, _, _, _, place), *_] = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing; selects the route
            own = probe.getsockname()[0]
    except OSError:
        return ""
    found = psutil.net_if_addrs().items()
    return next((name for name, those in found if own in {one.address.partition("%")[0] for one in those}), "")
