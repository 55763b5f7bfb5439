"""Creates torch's TCPStore on one address of a machine, instead of all addresses as torch does by default, and sets
gloo to that network. Anyone who can connect to a store can read and change it."""

import socket
from datetime import timedelta

import torch.distributed as dist

from dapo.config.node_environment import sockets_towards


def serve_store(address: str, timeout_s: float, port: int = 0) -> dist.TCPStore:
    """Returns a store served by this process at `address`, which must be one of this node's. Port 0 means a free port
    (see `.port`). The store lives as long as it is referenced. Raises OSError if the node has no such address or the
    port is taken."""
    sockets_towards(address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, port), family=family)
    taken = server.getsockname()[1]
    timeout = timedelta(seconds=timeout_s)
    # The store closes the socket.
    return dist.TCPStore(
        address, taken, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=server.detach()
    )


def find_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connects to the store of another process; waits for it for at most `timeout_s`."""
    sockets_towards(address)
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def meet(rank: int, address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Returns the store of a process group: served by rank 0, joined by the others."""
    return find_store(address, port, timeout_s) if rank else serve_store(address, timeout_s, port)
