"""Selects the network interface of process groups that span machines, for gloo and NCCL's sockets."""

import os
import socket

import psutil

GLOO, NCCL, NCCL_FAMILY = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"


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
