"""Receives weights inside vLLM's worker processes: the engine's half of the weight sync.

vLLM imports this module as `worker_extension_cls`, which registers the transfer backend. After an update the engine's
model has exactly the weights of the actors' buckets, or the update has failed.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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

from dapo.ground.fault_points import fault_point
from dapo.sandbox.kernel import die_with
from dapo.workers.rendezvous import find_store
from dapo.workers.weights.bucket import BACKEND, digest
from dapo.workers.weights.group import WeightGroup
from dapo.workers.weights.memory import Handle, open_shared, place


@dataclass
class BucketInitInfo(WeightTransferInitInfo):
    """The actors' endpoints."""

    transport: str  # `broadcast`, `ipc` or `files`
    capacity: int  # this and the next two: see `Endpoint`
    address: str
    port: int
    group_size: int  # of the process group
    first_rank: int  # of this engine's first worker in the group
    timeout_s: float
    memory: dict[str, list[Handle]]  # handles by place


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """One bucket."""

    index: int
    tensors: list[tuple[str, list[int], int]]  # (name, shape, first element)
    num_bytes: int
    dtype: str
    digest: str  # of its bytes, computed by the sender
    file: str  # `files`: where it is


class GroupSource:
    """Receives broadcasts of actor rank 0."""

    def __init__(self, info: BucketInitInfo, rank: int, device: torch.device) -> None:
        self._buffer = torch.empty(info.capacity, dtype=torch.uint8, device=device)
        store = find_store(info.address, info.port, info.timeout_s)
        rank += info.first_rank
        # NCCL hangs if members have different settings, and vLLM changes them for its own groups.
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
        """Does nothing: the memory is freed with the last reference."""


class FileSource:
    """Reads files on this machine: of an engine outside of the Ray cluster."""

    def receive(self, bucket: BucketUpdateInfo) -> Tensor:
        return torch.from_file(bucket.file, shared=False, size=bucket.num_bytes, dtype=torch.uint8)

    def close(self) -> None:
        """Does nothing: there is no connection."""


class BucketTransferEngine(WeightTransferEngine[BucketInitInfo, BucketUpdateInfo]):
    """Loads buckets through the model's own loader, layer by layer, and refuses an incomplete or altered set. It raises
    no error to vLLM but records the first one since `init` in `failure`: with several processes per engine, vLLM reads
    their answers up to the first error and takes the unread ones for answers to its next calls."""

    init_info_cls = BucketInitInfo
    update_info_cls = BucketUpdateInfo
    failure = ""
    _source: GroupSource | MemorySource | FileSource | None = None
    _under_way = False

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}"

    def init_transfer_engine(self, init_info: BucketInitInfo) -> None:
        """Opens this end of the transport, replacing an earlier one; the actors open theirs at the same time."""
        self.shutdown()
        self._device = next(self.model.parameters()).device
        with self._noting():
            if init_info.transport == "broadcast":
                self._source = GroupSource(init_info, self.parallel_config.rank, self._device)
            elif init_info.transport == "ipc":
                self._source = MemorySource(init_info, self._device)
            else:
                self._source = FileSource()

    def start_weight_update(self) -> None:
        """Restores the parameters to their checkpoint layout and records which ones must arrive."""
        self._under_way = True
        with self._noting():
            if self._device.type == "cpu":
                self._forget_packing()
            initialize_layerwise_reload(self.model)
            self._next = 0
            self._missing = {name for name, _ in self.model.named_parameters()}
            config = self.model_config  # if the files have a copy of the head, vLLM reports untied but ties later
            if config.hf_config.tie_word_embeddings or config.word_embeddings_untied_by_checkpoint:
                self._missing.discard("lm_head.weight")  # the embedding; see finish_weight_update

    def _forget_packing(self) -> None:
        """Makes vLLM pack experts for CPU kernels again: it does so only when it creates their first kernel."""
        for module in self.model.modules():
            if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
                method.moe_kernel = None

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        """Receives the next bucket, checks its digest and loads it. It fails if the bucket is not the next one, or its
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
        """Yields copies: the loader keeps tensors until their layer is complete, maybe a bucket later."""
        dtype = getattr(torch, bucket.dtype)
        coarse = fault_point("engine.weights") == "round"
        elements = data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)
        for name, shape, start in bucket.tensors:
            view = elements[start : start + torch.Size(shape).numel()].view(shape)
            copy = view.to(self._device, copy=True)
            yield name, rounded(copy) if coarse and copy.dim() > 1 else copy

    def finish_weight_update(self) -> None:
        """Restores the kernel layout. Fails if a parameter of the engine got no new value."""
        with self._noting():
            if self._missing:
                raise RuntimeError(
                    f"the weight sync left {len(self._missing)} parameters stale: {sorted(self._missing)[:5]}"
                )
            self.drop_weight_update()
            # On CPU a tied LM head has its own packed copy of the embedding; the layerwise reload does not update it.
            for module in self.model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    module.quant_method.process_weights_after_loading(module)

    def drop_weight_update(self) -> None:
        """Restores the kernel layout, also of an incomplete update: the next one brings what is missing."""
        if self._under_way:
            finalize_layerwise_reload(self.model, self.model_config)
        self._under_way = False

    def shutdown(self) -> None:
        """Releases buffers, shared memory and process group, and clears the recorded failure."""
        source, self._source, self.failure = self._source, None, ""
        if source is not None:
            source.close()


def rounded(weight: Tensor) -> Tensor:
    """Returns the weight in 255 steps between its extremes, for tests of a coarse engine."""
    step = weight.abs().max() / 127
    return (weight / step).round() * step


class WeightReceiverExtension:
    """Mixed into vLLM's worker class; its name makes vLLM import this module there."""

    weight_transfer_engine: BucketTransferEngine | None
    vllm_config: VllmConfig
    _weight_update_active: bool

    def weight_failure(self) -> str:
        """Returns the first failure of the weight sync in this process since it was opened, or ""."""
        assert self.weight_transfer_engine is not None
        return self.weight_transfer_engine.failure

    def leave_weight_sync(self) -> None:
        """Ends an update that failed midway, which vLLM would consider still running, and closes the transport: the
        other end may hang in it until then."""
        assert self.weight_transfer_engine is not None
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.shutdown()
            self.weight_transfer_engine.drop_weight_update()
        self._weight_update_active = False


logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)  # silence its warning that it cannot sleep
# Drop its warnings in every sync about layers without stored weights (rotary tables, a tied head); see `_missing`.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: record.msg != "%s: Failed to load weights"
)
die_with(os.getppid())  # an engine process must not outlive its Ray actor and hold the device
WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)
