"""Joins or starts a Ray cluster, and lists its nodes."""

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import ray
from ray._common.utils import get_system_memory
from ray._private.services import canonicalize_bootstrap_address, find_gcs_addresses, find_node_ids
from ray._private.state import available_resources_per_node
from ray._raylet import GcsClient, NodeID  # type: ignore[attr-defined]  # compiled
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]  # generated
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]  # generated
from ray.exceptions import RayError, RpcError

from dapo.ground.console import warn
from dapo.workers.gcs_watch import ASK_S, end_with_raylet, reach
from dapo.workers.own_cluster import in_own_groups, on_loopback, own_token, session_folder
from dapo.workers.placing.fit import Node
from dapo.workers.within import Late, left_behind, within

GIB = 1 << 30
OWN_HEAD_S, HEAD_S = 5.0, 30.0  # Ray itself gives up after 60 s, and leaves no time to save
UNIMPLEMENTED = 12  # gRPC's code
FIND_S, JOIN_S, LEAVE_S = 20.0, 300.0, 30.0
PREEMPTION = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION  # the one reason that Ray never refuses
DRAIN_S = 1.0  # between two looks at the nodes that go
KEY = "`trainer.ray_address`, or RAY_ADDRESS"

_own = ExitStack()  # undoes what our own cluster changed in this process
_left = _ended = threading.Event()  # leaving has begun; the cluster has ended


def connect(address: str, *, worker_logs: bool, keeps: bool = False) -> None:
    """Joins the cluster at `address` (`auto`, host:port). Starts a private one on this machine if `address` is `local`,
    or if neither it nor RAY_ADDRESS is set. `leave` ends it. keeps: it has to hold copies of the ranks' state. A signal
    interrupts the wait. Raises ValueError if the address is of Ray's client (`ray://`) or job server, because a run
    must be a process on a node; OSError if nothing listens there or it does not answer."""
    global _left, _ended
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    target = _target(address)
    local: dict[str, Any] = {}
    if target == "local":
        local = {
            "include_dashboard": False,
            "object_store_memory": _object_store_bytes(keeps),
            "_temp_dir": session_folder(),
        }
        _own.enter_context(own_token())
    else:
        target = _found(target)
    logging.getLogger("ray").setLevel(logging.ERROR)  # suppresses its warning about a non-main thread

    def join() -> None:
        ray.init(address=target, log_to_driver=worker_logs, logging_level=logging.ERROR, **local)

    _ended = ended = threading.Event()
    try:
        with in_own_groups(), on_loopback() if target == "local" else nullcontext():
            within(JOIN_S, join, f"to start Ray, or to join it ({KEY}),", until=ended)
    except BaseException:
        if not left_behind.is_set():
            leave()
        raise
    _left = threading.Event()
    if (node := ray._private.worker._global_node) is not None:
        ask = _asking(node.gcs_address, NodeID.from_hex(ray.get_runtime_context().get_node_id()))
        end_with_raylet(node.raylet_socket_name, node.gcs_address, _left, lambda: ask() == [False])


def _asking(head: str, *nodes: NodeID) -> Callable[[], list[bool] | None]:
    """Returns a function that asks the head (HOST:PORT) which nodes are alive; it returns None after `ASK_S` of no
    answer."""
    clients: list[GcsClient] = []

    def ask() -> list[bool] | None:
        try:
            if not clients:
                clients.append(GcsClient(address=head))
            alive: list[bool] = clients[0].check_alive([*nodes], timeout=ASK_S)
        except RpcError:
            return None
        return alive

    return ask


def leave() -> None:
    """Leaves the cluster, or ends the one that `connect` has started. If Ray does not shut down in time, or a signal
    arrives, the program continues, and its exit ends the remaining processes."""
    _left.set()
    try:
        within(LEAVE_S, ray.shutdown, "Ray's end")
    except Late as late:
        warn(f"{late}: its head process may stand still. The program ends without it")
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass
    finally:
        if not left_behind.is_set():
            _ended.set()
            _own.close()


def _found(target: str) -> str:
    """Returns HOST:PORT of the head. Raises OSError if there is none or it does not answer; Ray itself would retry for
    minutes."""
    if target == "auto":
        return canonicalize_bootstrap_address("auto") or target
    remedy = "start Ray there, give HOST:PORT of the head, or `trainer.ray_address=local`"
    try:
        reach(target, FIND_S)
    except OSError as error:
        raise ConnectionError(f"no Ray at {target} ({KEY}): {error}; {remedy}") from error
    try:
        within(FIND_S, lambda: GcsClient(address=target), "an answer")
    except Late:
        raise ConnectionError(
            f"what listens at {target} ({KEY}) has not answered as Ray's head does for {FIND_S:g} s; {remedy}"
        ) from None
    except RpcError as error:
        if error.rpc_code == UNIMPLEMENTED:
            raise ConnectionError(f"what listens at {target} ({KEY}) is not Ray's head ({error}); {remedy}") from None
    except Exception:  # it answers; `ray.init` explains a refusal
        pass
    return target


def _target(address: str) -> str:
    target = address or os.environ.get("RAY_ADDRESS", "local")
    if "://" in target:
        raise ValueError(
            f"`trainer.ray_address` or RAY_ADDRESS ({target}) is that of Ray's client or job server, and a run is a "
            "process on a node of the cluster: give HOST:PORT of the head, or `auto`, there, or hand the run over by "
            "`ray job submit --address http://HEAD:8265`"
        )
    if target not in ("local", "auto") and not re.search(r":\d+$", target):
        raise ValueError(f"{target} ({KEY}) is no address: give HOST:PORT of the head, `auto` or `local`")
    return target


def head(address: str) -> tuple[str, float, Callable[[], bool]]:
    """Returns HOST:PORT of Ray's head process, the seconds it may be unreachable, and a check of it, which returns
    False after `ASK_S` without an answer. The head of a cluster that `connect` started is never restarted. address: as
    in `connect`, which must be called first."""
    place: str = ray.get_runtime_context().gcs_address
    ask = _asking(place)
    return place, OWN_HEAD_S if _target(address) == "local" else HEAD_S, lambda: ask() is not None


def going_nodes(unknown_s: float, over: threading.Event) -> Callable[[], dict[str, float]]:
    """Returns a function that returns the nodes that were told to go (Ray's drain, `dapo leave`), by Ray's ids, with
    the seconds left to each. unknown_s: for a node without a deadline. A thread asks the head, which may stand still,
    until `over` is set."""
    deadlines: dict[str, float] = {}

    def ask() -> None:
        while not over.wait(DRAIN_S):
            now = time.time()
            found = ray._private.state.state.get_draining_nodes()
            for node in deadlines.keys() - found.keys():
                del deadlines[node]
            for node, at_ms in found.items():
                deadlines[node] = at_ms / 1000 if at_ms else deadlines.get(node, now + unknown_s)

    threading.Thread(target=ask, name="nodes that go", daemon=True).start()
    return lambda: {node: max(0.0, at - time.time()) for node, at in list(deadlines.items())}


def _object_store_bytes(keeps: bool) -> int:
    """Returns a fifth of the memory of the machine or container. At most 8 GiB, of which a single-machine run needs far
    less, unless it keeps copies of the ranks' state there."""
    part = get_system_memory() // 5
    return part if keeps else min(part, 8 * GIB)


def nodes() -> list[Node]:
    free = available_resources_per_node()
    found = []
    for each in ray.nodes():
        if each["Alive"]:
            there, left = each["Resources"], free.get(each["NodeID"], {})
            found.append(
                Node(
                    gpus=int(there.get("GPU", 0)),
                    cpus=there.get("CPU", 0.0),
                    free_gpus=left.get("GPU", 0.0),
                    free_cpus=left.get("CPU", 0.0),
                    labels=each["Labels"],
                )
            )
    return found


def tell_going(seconds: float) -> list[str]:
    """Tells the head that this machine's nodes go in `seconds` (Ray's drain), and returns their ids. The head's own is
    left out: Ray would end it, and the driver, as soon as it has no workers. The cluster is that of RAY_ADDRESS, or the
    one that is found here. Raises OSError if there is none, or it does not answer or refuses."""
    given = os.environ.get("RAY_ADDRESS", "")
    there = sorted(find_gcs_addresses()) if given in ("", "auto", "local") else [_target(given)]
    if len(there) != 1:
        found = f"nodes of several ({', '.join(there)}) are" if there else "no node of one is"
        raise ConnectionError(f"RAY_ADDRESS ({given or 'not set'}) names no Ray cluster, and {found} on this machine")
    place, at_ms = _found(there[0]), int((time.time() + seconds) * 1000)
    is_head: dict[str, bool] = {}

    def tell() -> None:
        head = GcsClient(address=place)
        alive = head.get_all_node_info(timeout=ASK_S, state_filter=GcsNodeInfo.GcsNodeState.ALIVE)
        here = find_node_ids()
        is_head.update({node.hex(): info.is_head_node for node, info in alive.items() if node.hex() in here})
        for node in (node for node in is_head if not is_head[node]):
            accepted, why = head.drain_node(node, PREEMPTION, "it was told to go", at_ms, timeout=ASK_S)
            if not accepted:
                raise ConnectionError(f"Ray's head at {place} refuses to let node {node} go: {why}")

    try:
        within(FIND_S, tell, "to tell Ray's head")
    except RayError as error:
        raise ConnectionError(f"Ray's head at {place} (RAY_ADDRESS) was not told: {error}") from None
    if not is_head:
        raise ConnectionError(f"no node of the Ray cluster at {place} (RAY_ADDRESS) is on this machine")
    return [node for node in is_head if not is_head[node]]
