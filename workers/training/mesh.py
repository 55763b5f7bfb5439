"""Creates the actor ranks' process groups: which ranks shard parameters together, and which share a sequence.
Neighbouring ranks, usually on one node, form each sequence-parallel group and each shard group."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dapo.workers.rendezvous import meet


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """This rank's place among the ranks that share each micro-batch. group: None for a single rank."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class Mesh:
    """The process groups of one rank."""

    device: str  # `cpu` or `cuda`
    rank: int
    world_size: int
    fsdp: DeviceMesh  # 1-D ("shard") or, with copies (HSDP), 2-D ("replicate", "shard")
    sequence_parallel: SequenceParallel
    files: dist.ProcessGroup  # all ranks, on CPU, for collectives of file writes, which may run during an update

    @property
    def num_copies(self) -> int:
        """Number of copies of the parameters over all ranks."""
        return self.world_size // self.fsdp.size(-1)


def join(device: str, *, rank: int, world_size: int, address: str, port: int, timeout_s: float) -> None:
    """Joins the process group at address:port, on rank 0's node; `timeout_s` bounds each collective."""
    if device == "cuda":
        torch.cuda.set_device(0)  # Ray shows each rank only its own GPU
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=meet(rank, address, port, timeout_s),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def arrange(
    device: str, *, timeout_s: float, files_timeout_s: float, fsdp_size: int, sequence_parallel_size: int
) -> Mesh:
    """Arranges all joined ranks in groups; a collective. `timeout_s` bounds each collective of theirs, and
    `files_timeout_s` those about files. fsdp_size: `actor.fsdp_size`. sequence_parallel_size:
    `actor.ulysses_sequence_parallel_size`. Both divide the number of ranks (`dapo.config.rules.model` has checked)."""
    timeout = timedelta(seconds=timeout_s)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = world_size if fsdp_size == -1 else fsdp_size
    group = _group(_blocks(world_size, sequence_parallel_size), timeout) if sequence_parallel_size > 1 else None
    sequence_parallel = SequenceParallel(rank % sequence_parallel_size, sequence_parallel_size, group)
    files = dist.new_group(backend="gloo", timeout=timedelta(seconds=files_timeout_s))
    assert isinstance(files, dist.ProcessGroup)
    return Mesh(device, rank, world_size, _fsdp_mesh(device, world_size, size, timeout), sequence_parallel, files)


def _fsdp_mesh(device: str, world_size: int, size: int, timeout: timedelta) -> DeviceMesh:
    if size == world_size:
        assert dist.group.WORLD is not None
        return DeviceMesh.from_group(dist.group.WORLD, device, mesh_dim_names=("shard",))
    blocks = _blocks(world_size, size)
    shard = _group(blocks, timeout)
    replicate = _group([list(ranks) for ranks in zip(*blocks, strict=True)], timeout)
    return DeviceMesh.from_group(
        [replicate, shard], device, mesh=torch.tensor(blocks), mesh_dim_names=("replicate", "shard")
    )


def _blocks(world_size: int, size: int) -> list[list[int]]:
    return [list(range(start, start + size)) for start in range(0, world_size, size)]


def _group(partition: Sequence[list[int]], timeout: timedelta) -> dist.ProcessGroup:
    """Creates this rank's group of a partition of all ranks; a collective. Groups do not inherit the timeout."""
    group, _ = dist.new_subgroups_by_enumeration(list(partition), timeout=timeout)
    assert group is not None
    return group
