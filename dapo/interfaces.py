"""Chooses the network interface of process groups that span machines.

In: the address of the first of their processes. Out: gloo listens where the others reach it, and nowhere else.
"""

import os
import socket

import psutil

GLOO = "GLOO_SOCKET_IFNAME"


def gloo_towards(address: str) -> None:
    """Lets gloo in this process use the interface by which it reaches `address`, unless GLOO_SOCKET_IFNAME names one.

    By itself gloo takes what the machine's own name means: on Debian and many clouds 127.0.1.1, which every other
    machine takes for itself.
    """
    if GLOO not in os.environ and (name := _interface_towards(address)):
        os.environ[GLOO] = name


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
