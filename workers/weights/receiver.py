"""Receives weights in the engine, inside vLLM's worker processes: the engine's half of the weight sync.

vLLM imports this module as `worker_extension_cls`, which registers the transfer backend there. In: buckets, by one of
two transports, with their digests. Out: the engine's model holds exactly those weights, or the update raises.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.utils.nccl import unpinned_nccl_env

from dapo.sandbox.kernel import die_with
from workers.meeting import find_store
from workers.weights.asleep import free
from workers.weights.bucket import BACKEND, digest
from workers.weights.group import WeightGroup
from workers.weights.memory import Handle, open_shared, place


@dataclass
class BucketInitInfo(WeightTransferInitInfo):
    """Holds the actors' ends. transport, capacity, address, port: see `Endpoint`. group_size, first_rank: of the
    process group, and the rank of this engine's first worker in it. memory: the handles of each place.
    """

    transport: str
    capacity: int
    address: str
    port: int
    group_size: int
    first_rank: int
    timeout_s: float
    memory: dict[str, list[Handle]]


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """Describes one bucket. tensors: (name, shape, first element) each. digest: what the sender computed over its
    bytes."""

    index: int
    tensors: list[tuple[str, list[int], int]]
    num_bytes: int
    dtype: str
    digest: str


class Source(Protocol):
    """Receives at the engine's end of a transport."""

    def receive(self, bucket: BucketUpdateInfo) -> Tensor:
        """Returns [num_bytes] uint8, valid until the next call."""

    def close(self) -> None:
        """Lets go of the other end."""


class GroupSource:
    """Broadcasts of actor rank 0."""

    def __init__(self, info: BucketInitInfo, rank: int, device: torch.device) -> None:
        self._buffer = torch.empty(info.capacity, dtype=torch.uint8, device=device)
        store = find_store(info.address, info.port, info.timeout_s)
        rank += info.first_rank
        # NCCL hangs where members differ in settings, and vLLM makes its own for its own groups.
        with unpinned_nccl_env():
            self._group = WeightGroup(store, rank=rank, size=info.group_size, device=device, timeout_s=info.timeout_s)

    def receive(self, bucket: BucketUpdateInfo) -> Tensor:
        part = self._buffer[: bucket.num_bytes]
        self._group.wait(self._group.broadcast(part))
        return part

    def close(self) -> None:
        self._group.close()


class MemorySource:
    """Reads the slots of the actor rank on the same GPU, in place."""

    def __init__(self, info: BucketInitInfo, device: torch.device) -> None:
        here = place(device)
        if here not in info.memory:
            raise RuntimeError(
                f"no actor rank shares memory with this engine: it is on {here}, they on {[*info.memory]}"
            )
        self._slots = [open_shared(handle, device) for handle in info.memory[here]]

    def receive(self, bucket: BucketUpdateInfo) -> Tensor:
        return self._slots[bucket.index % len(self._slots)][: bucket.num_bytes]

    def close(self) -> None:
        """Does nothing: the memory goes with the last reference."""


class BucketTransferEngine(WeightTransferEngine[BucketInitInfo, BucketUpdateInfo]):
    """Loads buckets through the model's own loader, layer by layer, and refuses an incomplete or altered set.

    It raises nothing that vLLM would carry: of several processes of an engine vLLM reads the answers up to the first
    error, and takes those that it left for answers to its next questions. failure: what went wrong, since `init`.
    """

    init_info_cls = BucketInitInfo
    update_info_cls = BucketUpdateInfo
    failure = ""
    _source: Source | None = None
    _under_way = False

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}"

    def init_transfer_engine(self, init_info: BucketInitInfo) -> None:
        """Opens this end of the transport, in place of an earlier one; the actors open theirs at the same time."""
        self.shutdown()
        self._device = next(self.model.parameters()).device
        with self._noting():
            if init_info.transport == "broadcast":
                self._source = GroupSource(init_info, self.parallel_config.rank, self._device)
            else:
                self._source = MemorySource(init_info, self._device)

    def start_weight_update(self) -> None:
        """Restores the parameters to their checkpoint layout and notes which ones must arrive."""
        self._under_way = True
        with self._noting():
            if self._device.type == "cpu":
                self._forget_packing()
            initialize_layerwise_reload(self.model)
            self._next = 0
            self._missing = {name for name, _ in self.model.named_parameters()}
            config = self.model_config  # of files with a copy of the head vLLM says untied, and ties it after loading
            if config.hf_config.tie_word_embeddings or config.word_embeddings_untied_by_checkpoint:
                self._missing.discard("lm_head.weight")  # it is the embedding; see finish_weight_update

    def _forget_packing(self) -> None:
        """Has vLLM pack experts for a CPU's kernels once more: it packs them only with their first kernel."""
        for module in self.model.modules():
            if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
                method.moe_kernel = None

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """Takes the next bucket, checks its digest and loads it. A failure is that it is not the next one, or that its
        bytes differ from those that the actors sent."""
        with self._noting():
            self._receive(update_info)

    def _receive(self, bucket: BucketUpdateInfo) -> None:
        assert self._source is not None
        if bucket.index != self._next:
            raise RuntimeError(f"weight bucket {bucket.index} came, and {self._next} was due")
        self._next += 1
        data = self._source.receive(bucket)
        found = digest(data)
        if found != bucket.digest:
            raise RuntimeError(f"weight bucket {bucket.index} has digest {found}, the actors sent {bucket.digest}")
        self._missing -= self.model.load_weights(self._tensors(data, bucket))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the actors may overwrite the bucket from here on

    def _tensors(self, data: Tensor, bucket: BucketUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        """Yields copies: the loader keeps a layer's tensors until it has all of them, which may be a bucket later."""
        dtype = getattr(torch, bucket.dtype)
        elements = data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)
        for name, shape, start in bucket.tensors:
            view = elements[start : start + torch.Size(shape).numel()].view(shape)
            yield name, view.to(self._device, copy=True)

    def finish_weight_update(self) -> None:
        """Puts the kernel layout back. A failure is that some parameter of the engine got no new value."""
        with self._noting():
            if self._missing:
                raise RuntimeError(
                    f"the weight sync left {len(self._missing)} parameters stale: {sorted(self._missing)[:5]}"
                )
            self.drop_weight_update()
            # A tied LM head keeps its own packed copy of the embedding on CPU; the layerwise reload does not renew it.
            for module in self.model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    module.quant_method.process_weights_after_loading(module)

    def drop_weight_update(self) -> None:
        """Puts the kernel layout back, whatever has arrived: what a failure left out, the next update brings."""
        if self._under_way:
            finalize_layerwise_reload(self.model, self.model_config)
        self._under_way = False

    def shutdown(self) -> None:
        """Lets go of buffers, memory of others, the process group, and of what went wrong with them."""
        source, self._source, self.failure = self._source, None, ""
        if source is not None:
            source.close()


class WeightReceiverExtension:
    """Adds to vLLM's worker class, which it is mixed into; its name makes vLLM import this module there."""

    weight_transfer_engine: BucketTransferEngine | None
    vllm_config: VllmConfig
    model_runner: Any
    _weight_update_active: bool

    def weight_failure(self) -> str:
        """Returns what went wrong with the weight sync in this process since it was opened, or ""."""
        assert self.weight_transfer_engine is not None
        return self.weight_transfer_engine.failure

    def leave_weight_sync(self) -> None:
        """Ends an update that failed midway, which vLLM would take for one under way, and lets go of the transport: the
        other end may hang in it until then."""
        assert self.weight_transfer_engine is not None
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.shutdown()
            self.weight_transfer_engine.drop_weight_update()
        self._weight_update_active = False

    def free_host_memory(self, *, weights: bool) -> int:
        """Frees, on a CPU, what sleeping frees on a GPU: the KV cache, and with `weights` these too. Returns bytes."""
        if self.model_runner.device.type != "cpu":
            return 0
        return free([*self.model_runner.kv_caches, *(self.model_runner.model.parameters() if weights else ())])


logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)  # it warns that it does not sleep
# It warns, in every sync, of layers that no file has weights for: rotary tables, a tied head. `_missing` knows better.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: record.msg != "%s: Failed to load weights"
)
die_with(os.getppid())  # an engine process whose Ray actor was killed must not stay behind and hold the device
WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)
