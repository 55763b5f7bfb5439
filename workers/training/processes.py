"""Identifies the processes of the ranks, and kills them reliably, even if stopped or hanging in a driver call."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dapo.workers.remote import RemoteError, wait

POLL_S = 0.05
GRACE_S = 1.0
NICENESS = 19  # Ray's own processes have 15; a thread that holds the GIL still gets a share of a busy machine


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Identifies the process of a rank."""

    host: str
    node: str
    space: str  # boot and pid namespace: equal in all processes that see the same pids
    pid: int
    started: str  # in clock ticks since boot, because pids are reused
    gpus: tuple[str, ...] = ()  # assigned by Ray


def own_process() -> RankProcess:
    node = ray.get_runtime_context().get_node_id()
    gpus = tuple(map(str, ray.get_gpu_ids()))
    return RankProcess(ray.util.get_node_ip_address(), node, _own_space(), os.getpid(), _start_of(os.getpid()), gpus)


def give_way() -> None:
    """Lowers the calling thread's priority for good, so that computation on this machine goes first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def free_address() -> tuple[str, int]:
    """Returns an address of this node and a free port on it."""
    address = ray.util.get_node_ip_address()
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        return address, server.getsockname()[1]


def _own_space() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _start_of(pid: int) -> str:
    """Returns when a process started; "" if it has ended, also as a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def end_here(processes: Sequence[RankProcess], timeout_s: float) -> list[int]:
    """Waits for processes of this machine to end, which Ray has already requested, and kills them after `GRACE_S`.
    Returns, after at most `timeout_s`, the ids of those still running."""
    began = time.monotonic()
    while left := [p.pid for p in processes if p.started and _start_of(p.pid) == p.started]:
        waited = time.monotonic() - began
        if waited > timeout_s:
            break
        if waited > GRACE_S:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return left


async def end_all(processes: Sequence[RankProcess], timeout_s: float, key: str) -> None:
    """Returns when all processes have ended, or their node does not answer. Raises RemoteError if one still runs after
    `timeout_s` (configuration key `key`)."""
    of_node: dict[tuple[str, str], list[RankProcess]] = {}
    for process in processes:
        of_node.setdefault((process.node, process.space), []).append(process)
    left = await asyncio.gather(*[_end_on(node, those, timeout_s, key) for (node, _), those in of_node.items()])
    if stuck := ", ".join(found for found in left if found):
        raise RemoteError(
            f"{stuck} did not end within {timeout_s:g} s after SIGKILL (`{key}`); restart that machine, or leave it out"
        )


async def _end_on(node: str, processes: Sequence[RankProcess], timeout_s: float, key: str) -> str:
    """Ends the processes of one node and describes those still running; "" if none."""
    if processes[0].space == _own_space():
        left = await asyncio.to_thread(end_here, processes, timeout_s)
    elif node not in {each["NodeID"] for each in await asyncio.to_thread(ray.nodes) if each["Alive"]}:
        return ""
    else:
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(end_here)
        there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        try:
            ref = remote.options(scheduling_strategy=there).remote(processes, timeout_s)
            [left] = await wait([ref], 2 * timeout_s, f"the end of actor ranks on {processes[0].host}", key)
        except RemoteError:  # the node is lost, or hangs: then the next start there reports it
            return ""
    return f"process {', '.join(map(str, left))} on {processes[0].host}" if left else ""
