"""Chooses the network interface of process groups that span machines.

In: the address of the first of their processes. Out: gloo and NCCL's sockets listen where the others reach them, and
nowhere else.
"""

import os
import socket

import psutil

GLOO, NCCL, NCCL_FAMILY = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"


def sockets_towards(address: str) -> None:
    """Lets gloo, and NCCL where it meets and where it has TCP alone, use the interface by which this process reaches
    `address`, unless the environment names one.

    By itself gloo takes what the machine's own name means: on Debian and many clouds 127.0.1.1, which every other
    machine takes for itself. NCCL takes the first interface of the machine, which the others may not reach.
    """
    mine = [GLOO] if NCCL_FAMILY in os.environ else [GLOO, NCCL]
    unnamed = [name for name in mine if name not in os.environ]
    if unnamed and (found := _interface_towards(address)):
        values = {GLOO: found, NCCL: f"={found}"}  # NCCL reads a bare name as the beginning of several
        os.environ.update({name: values[name] for name in unnamed})


def _interface_towards(address: str) -> str:
    """Returns the name of the interface; empty where there is no way to the address, or the name is not known."""
    try:
        [(family, _, _, _, place), *_] = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing; chooses the way
            own = probe.getsockname()[0]
    except OSError:
        return ""
    found = psutil.net_if_addrs().items()
    return next((name for name, those in found if own in {one.address.partition("%")[0] for one in those}), "")
