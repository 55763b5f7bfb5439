"""Checks, before anything starts, whether the pools fit on the nodes, and orders the ranks' bundles by node. Its
messages state what is requested, what is available, and what to change."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dapo.workers.placing.asked import Pool

OWN_LABEL = "ray.io/node-id"  # set by Ray, unique per node


@dataclass(frozen=True, slots=True)
class Node:
    """A live node: its total and unreserved resources, and its labels."""

    gpus: int
    cpus: float
    free_gpus: float
    free_cpus: float
    labels: Mapping[str, str]


def problems(pools: Sequence[Pool], nodes: Sequence[Node]) -> list[str]:
    """Returns why even the empty cluster cannot hold the pools, with remedies; empty if it can."""
    unlabelled = [_no_node(pool, nodes) for pool in pools if not _suited(pool, nodes)]
    if unlabelled:
        return unlabelled
    there, asked = sum(node.gpus for node in nodes), sum(pool.all_gpus for pool in pools)
    if asked > there:
        wanted = ", ".join(f"{pool.all_gpus} for {pool.about}" for pool in pools if pool.gpus)
        return [
            f"asked for {asked} GPUs but the Ray cluster has {there}: {wanted}; lower them, add "
            f"{_missing(pools, nodes, _largest(nodes))}, or set `trainer.device=cpu` (`reward.model.device=cpu` for "
            "the reward model alone); `trainer.nodes_timeout_s` lets the run wait for nodes that are still to join"
        ]
    large = [_too_large(pool, nodes) for pool in pools if pool.gpus > _most(pool, nodes)]
    if large:
        return large
    found = placed(pools, nodes, free=False)
    return [_too_few(pool, found[pool.name], pools, nodes) for pool in pools if found[pool.name] < pool.count]


def placed(pools: Sequence[Pool], nodes: Sequence[Node], *, free: bool) -> dict[str, int]:
    """Returns how many pieces of each pool fit. Places piece by piece as Ray does, each on the node that it leaves the
    least room on. free: count only unreserved resources."""
    left = [[node.free_gpus, node.free_cpus] if free else [float(node.gpus), node.cpus] for node in nodes]
    found = {}
    for pool in pools:
        found[pool.name] = 0
        for _ in range(pool.count):
            rooms = [
                room
                for node, room in zip(nodes, left, strict=True)
                if _takes(pool, node) and room[0] >= pool.gpus and room[1] >= pool.cpus
            ]
            if not rooms:
                break
            room = min(rooms)
            room[0], room[1] = room[0] - pool.gpus, room[1] - pool.cpus
            found[pool.name] += 1
    return found


def lines(pools: Sequence[Pool], nodes: Sequence[Node]) -> list[str]:
    """Returns log lines on what is requested, available and fitting. Has one line per pool if there are several nodes
    or too few free GPUs; none without pools."""
    if not pools:
        return []
    asked, there = sum(pool.all_gpus for pool in pools), sum(node.gpus for node in nodes)
    free = math.floor(sum(node.free_gpus for node in nodes))
    need = f"placement: the run needs {asked} GPU{'s' * (asked > 1)}"
    have = f"; {free} of {there} are free, on {shapes(nodes)}" if there else "; no node has one"
    found = [f"{need}{have}"] if asked else []
    if len(nodes) == 1 and free >= asked:
        return found
    ever, now = placed(pools, nodes, free=False), placed(pools, nodes, free=True)
    return found + [_line(pool, nodes, ever[pool.name], now[pool.name]) for pool in pools]


def in_order(node_of: Mapping[int, str], block: int) -> list[int]:
    """Returns the bundles in rank order: first as many whole blocks of `block` bundles on one node as possible, then
    the rest node by node. node_of: the node of each bundle; Ray assigns equal bundles to nodes in arbitrary order."""
    on: defaultdict[str, list[int]] = defaultdict(list)
    for bundle in sorted(node_of):
        on[node_of[bundle]].append(bundle)
    whole: list[int] = []
    rest: list[int] = []
    for node in sorted(on):
        cut = len(on[node]) // block * block
        whole += on[node][:cut]
        rest += on[node][cut:]
    return whole + rest


def _takes(pool: Pool, node: Node) -> bool:
    return pool.labels.items() <= node.labels.items()


def _suited(pool: Pool, nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if _takes(pool, node)]


def _most(pool: Pool, nodes: Sequence[Node]) -> int:
    return _largest(_suited(pool, nodes)).gpus


def _where(pool: Pool) -> str:
    return f" with {_written(pool.labels)} (`{pool.labels_key}`)" if pool.labels else ""


def _written(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def shapes(nodes: Sequence[Node]) -> str:
    """Returns the nodes by number of GPUs, for example `15 nodes of 8 GPUs, 1 node of 4 GPUs`."""
    counts = Counter(node.gpus for node in nodes if node.gpus)
    return ", ".join(_count(count, gpus) for gpus, count in sorted(counts.items(), reverse=True)) or "no node"


def _count(nodes: int, gpus: int) -> str:
    return f"{nodes} {_nodes(nodes)} of {gpus} GPUs"


def _nodes(count: int) -> str:
    return "node" if count == 1 else "nodes"


def _line(pool: Pool, nodes: Sequence[Node], ever: int, now: int) -> str:
    what = f"{pool.count} x {pool.gpus} GPUs, each on one node" if pool.gpus else f"{pool.count}, without GPUs"
    suited = len(_suited(pool, nodes))
    where = f", of {suited} {_nodes(suited)}{_where(pool)}" if pool.labels else ""
    if now == pool.count:
        fits = "all fit"
    elif ever == pool.count:
        fits = f"{now} fit now, all once other jobs have ended"
    else:
        fits = f"{ever} fit"
    return f"  {pool.name}: {what}{where}: {fits}"


def _no_node(pool: Pool, nodes: Sequence[Node]) -> str:
    there = Counter(f"{name}={value}" for node in nodes for name, value in node.labels.items() if name != OWN_LABEL)
    listed = ", ".join(f"{label} ({count})" for label, count in sorted(there.items()))
    return (
        f"`{pool.labels_key}` ({_written(pool.labels)}): none of the {len(nodes)} nodes of the Ray cluster has that; "
        f"{f'their labels are {listed}' if listed else 'they have no labels'}; correct the key, or start nodes with "
        f"`ray start --labels={_written(pool.labels).replace(' ', '')}`"
    )


def _too_large(pool: Pool, nodes: Sequence[Node]) -> str:
    suited, most = _suited(pool, nodes), _most(pool, nodes)
    return (
        f"{pool.piece} need {pool.gpus} GPUs of one node, and the largest of {len(suited)} nodes{_where(pool)} has "
        f"{most}; lower that key to {most} or less, or take larger nodes"
    )


def _too_few(pool: Pool, fitting: int, pools: Sequence[Pool], nodes: Sequence[Node]) -> str:
    suited = _suited(pool, nodes)
    lower = f"set `{pool.count_key}` to {fitting * pool.per_piece}" if fitting else "lower what the others ask for"
    return (
        f"{pool.piece} need {pool.gpus} GPUs and {pool.cpus} CPUs of one node, and the Ray cluster{_where(pool)}, "
        f"{shapes(suited)}, has room for {fitting} times that beside the other roles, not {pool.count}; {lower}, or "
        f"add {_missing(pools, nodes, _largest(suited))}"
    )


def _largest(nodes: Sequence[Node]) -> Node:
    return max(nodes, key=lambda node: (node.gpus, node.cpus))


def _missing(pools: Sequence[Pool], nodes: Sequence[Node], like: Node) -> str:
    """Returns as text how many more nodes of the same kind would make all pools fit."""
    for count in range(1, sum(pool.count for pool in pools) + 1):
        found = placed(pools, [*nodes, *[like] * count], free=False)
        if all(found[pool.name] == pool.count for pool in pools):
            return _count(count, like.gpus)
    return "larger nodes"
