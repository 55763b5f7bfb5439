"""Trains the policy on FSDP2 ranks; the driver-side pool speaks for all of them.

In: `TrainBatch`es with advantages and token weights. Out: metrics, checkpoints, and full weights for the engines.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch

from dapo.config.model_shape import UnknownShape, read_shape
from dapo.config.schema import Config
from dapo.derived import transfer_timeout_s
from dapo.packing import ATTENTION_EQUALS_REST_TOKENS, pack
from dapo.types import Float32Array, TrainBatch, TrainSequence
from workers.remote import PartialFailure, RemoteError, wait, wait_for_ranks
from workers.training import fsdp, mesh, state
from workers.training.update import Updater
from workers.weights.bucket import Bucket, Endpoint
from workers.weights.sender import WeightSender

MicroBatches = tuple[tuple[TrainSequence, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """Holds one rank's share of a `TrainBatch`. Made by `split_batch`, consumed by `ActorWorker.update`.

    minibatches: this rank's micro-batches of each; the same number on all ranks, missing ones empty. order: see
    `TrainBatch`.
    """

    version: int
    minibatches: tuple[MicroBatches, ...]
    order: tuple[int, ...]


def split_batch(
    batch: TrainBatch, num_ranks: int, max_tokens: int, equal_at: int = ATTENTION_EQUALS_REST_TOKENS
) -> list[RankWork]:
    """Packs each mini-batch over ranks, or groups of sequence-parallel ranks (`dapo.packing`).

    Raises ValueError for a sequence beyond `max_tokens`, the bound on a micro-batch.
    """
    shares: list[list[MicroBatches]] = [[] for _ in range(num_ranks)]
    for sequences in batch.minibatches:
        packed = pack([len(sequence.token_ids) for sequence in sequences], num_ranks, max_tokens, equal_at)
        for share, micro_batches in zip(shares, packed, strict=True):
            share.append(tuple(tuple(sequences[i] for i in indices) for indices in micro_batches))
    return [RankWork(version=batch.version, minibatches=tuple(share), order=batch.order) for share in shares]


def _equal_at(model_path: str) -> int:
    """Returns the length at which attention costs as much as the rest; a guess where the model's shape is unknown."""
    try:
        return read_shape(model_path).attention_equals_rest_tokens
    except UnknownShape:
        return ATTENTION_EQUALS_REST_TOKENS


class ActorWorker:
    """Runs one FSDP rank; a Ray actor in the pool. Every method but `free_address` is a collective over all ranks."""

    def __init__(self, cfg: Config, device: str) -> None:
        self._cfg = cfg
        self._device = device

    def free_address(self) -> tuple[str, int]:
        """Returns an address of this node and a free port on it, for the process group."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as server:
            server.bind(("", 0))
            return address, server.getsockname()[1]

    def start(self, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
        """Joins the process group, load and shard the model, build the optimizer."""
        if self._device == "cpu" or self._cfg.actor.offload:  # Ray gives a process with a GPU one thread
            torch.set_num_threads(self._cfg.actor.cpu_threads)
        self._rank = rank
        mesh.join(
            self._device,
            rank=rank,
            world_size=world_size,
            address=master_addr,
            port=master_port,
            timeout_s=self._cfg.actor.timeout_s,
        )
        self._build()

    def _build(self) -> None:
        """Makes of the ranks that have joined what the configuration says."""
        cfg = self._cfg
        self._mesh = mesh.arrange(
            self._device,
            timeout_s=cfg.actor.timeout_s,
            fsdp_size=cfg.actor.fsdp_size,
            sequence_parallel_size=cfg.actor.ulysses_sequence_parallel_size,
        )
        self._policy = fsdp.load_policy(cfg, self._mesh)
        self._optimizer = fsdp.build_optimizer(self._policy, cfg)
        kl, reference = cfg.algorithm.kl, None
        if kl.loss_coeff or kl.reward_coeff:
            reference = fsdp.load_reference(cfg, self._mesh, self._policy)
        self._updater = Updater(self._policy, reference, self._optimizer, cfg, self._mesh)

    def update(self, work: RankWork) -> dict[str, float]:
        """Trains on this rank's share; the metrics are those of all ranks."""
        metrics = self._updater.update(work.version, work.minibatches, work.order)
        fsdp.release(self._policy, self._cfg, self._mesh)
        return metrics

    def reference_logprobs(self, micro_batches: MicroBatches) -> list[Float32Array]:
        """Returns [R] of every sequence, in the order of the micro-batches."""
        logprobs = self._updater.reference_logprobs(micro_batches)
        return [values.numpy() for of_micro_batch in logprobs for values in of_micro_batch]

    def open_weights(self, transport: str) -> tuple[int, Endpoint | None]:
        """Returns the number of buckets of a weight sync, and this rank's end of the transport where it has one."""
        dtype = getattr(torch, self._cfg.model.dtype)
        self._sender = WeightSender(
            lambda: fsdp.full_parameters(self._policy, self._mesh, dtype),
            fsdp.full_shapes(self._policy.model),
            dtype=self._cfg.model.dtype,
            bucket_bytes=self._cfg.weight_sync.bucket_bytes,
            rank=self._rank,
            device=torch.device(self._device, 0),
        )
        endpoint = self._sender.open(transport, ray.util.get_node_ip_address(), transfer_timeout_s(self._cfg))
        return self._sender.num_buckets, endpoint

    def join_weights(self, num_receivers: int) -> None:
        """Meets the engines' processes; returns when all have come."""
        self._sender.join(num_receivers)

    def gather_bucket(self, index: int) -> Bucket | None:
        """Sends the next bucket of weights on its way to the engines and returns it; None on all ranks but 0."""
        return self._sender.gather(index)

    def save(self, directory: str) -> None:
        """Writes model and optimizer into `directory`. The actors draw no random number and hold no other state.

        Raises:
            RuntimeError: an update failed between two of its optimizer steps, or copies of the parameters (HSDP)
                have drifted apart.
        """
        if not self._updater.is_whole:
            raise RuntimeError(
                "the last update failed between two optimizer steps; its weights are of no policy version"
            )
        state.save_state(self._policy, self._optimizer, self._mesh, directory)

    def load(self, directory: str) -> None:
        """Reads what `save` wrote, on this or another number of ranks."""
        state.load_state(self._policy, self._optimizer, directory)

    def export_hf(self, directory: str) -> None:
        """Writes configuration, tokenizer and safetensors, on rank 0."""
        state.export_hf(self._policy, self._mesh, self._cfg.model, directory)


class ActorPool:
    """Speaks for all FSDP ranks as one. Each call has the deadline that the configuration gives it."""

    def __init__(self, cfg: Config, device: str, options: Sequence[dict[str, Any]]) -> None:
        """Makes the ranks' actors. options: Ray options of each rank (`workers.cluster.Placement.actors`)."""
        self._cfg = cfg
        self._out_of_step = ""
        remote = ray.remote(ActorWorker)
        self._workers: list[Any] = [remote.options(**option).remote(cfg, device) for option in options]

        self._sequence_parallel = cfg.actor.ulysses_sequence_parallel_size  # ranks per micro-batch
        self._bounds = (
            len(self._workers) // self._sequence_parallel,
            cfg.actor.max_tokens_per_gpu * self._sequence_parallel,
            _equal_at(cfg.model.path),
        )

    def _group_of(self, rank: int) -> int:
        """Returns which part of the work a rank takes part in: that of its sequence-parallel group of neighbours."""
        return rank // self._sequence_parallel

    async def start(self) -> None:
        """Loads the model on all ranks. Raises RemoteError, as every method does when a rank fails or keeps silent."""
        timeout_s, key = self._cfg.actor.start_timeout_s, "actor.start_timeout_s"
        [(address, port)] = await wait([self._workers[0].free_address.remote()], timeout_s, "actor rank 0", key)
        refs = [
            worker.start.remote(rank, len(self._workers), address, port) for rank, worker in enumerate(self._workers)
        ]
        await wait_for_ranks(refs, timeout_s, "loading the model", key)

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """Trains on a batch, one optimizer step per entry of its order; returns metrics over all ranks and steps."""
        works = [ray.put(work) for work in split_batch(batch, *self._bounds)]
        refs = [worker.update.remote(works[self._group_of(rank)]) for rank, worker in enumerate(self._workers)]
        what = f"the update from policy version {batch.version}"
        try:
            return (await wait_for_ranks(refs, self._cfg.actor.timeout_s, what, "actor.timeout_s"))[0]
        except PartialFailure as error:
            self._out_of_step = str(error)
            raise

    async def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
        """Returns the reference policy's log-probabilities of the response tokens, [R] per sequence, in their order."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        packed = pack(lengths, *self._bounds)
        works = [ray.put(tuple(tuple(sequences[i] for i in indices) for indices in share)) for share in packed]
        refs = [
            worker.reference_logprobs.remote(works[self._group_of(rank)]) for rank, worker in enumerate(self._workers)
        ]
        what = "the reference policy's log-probabilities"
        results = await wait_for_ranks(refs, self._cfg.actor.timeout_s, what, "actor.timeout_s")
        found: dict[int, Float32Array] = {}
        for micro_batches, arrays in zip(packed, results[:: self._sequence_parallel], strict=True):
            found |= zip((i for indices in micro_batches for i in indices), arrays, strict=True)
        return [found[i] for i in range(len(sequences))]

    async def open_weights(self, transport: str) -> tuple[int, list[Endpoint | None]]:
        """Returns the number of buckets of a weight sync, and each rank's end of the transport."""
        refs = [worker.open_weights.remote(transport) for worker in self._workers]
        opened = await self._weights(refs, "opening the weight sync")
        return opened[0][0], [endpoint for _, endpoint in opened]

    async def join_weights(self, num_receivers: int) -> None:
        """Lets the ranks meet the engines' processes."""
        refs = [worker.join_weights.remote(num_receivers) for worker in self._workers]
        await self._weights(refs, "meeting the engines for the weight sync")

    async def gather_bucket(self, index: int, what: str) -> Bucket:
        """Sends the next bucket of weights on its way and returns it. what: which one of which sync, for errors."""
        refs = [worker.gather_bucket.remote(index) for worker in self._workers]
        return (await self._weights(refs, f"gathering {what}"))[0]

    async def save(self, directory: str) -> None:
        """Writes model and optimizer into `directory`, which all ranks must see.

        Raises RemoteError after an update that failed on some ranks only, and where copies have drifted apart."""
        if self._out_of_step:  # others hang in a collective of the update, and would until its deadline
            raise RemoteError(
                f"the ranks are no longer at the same point, because an update failed: {self._out_of_step}"
            )
        await self._checkpoint([worker.save.remote(directory) for worker in self._workers], f"saving {directory}")

    async def load(self, directory: str) -> None:
        """Reads what `save` wrote, also by another number of ranks."""
        await self._checkpoint([worker.load.remote(directory) for worker in self._workers], f"loading {directory}")

    async def export_hf(self, directory: str) -> None:
        """Writes the model as transformers and vLLM load it."""
        refs = [worker.export_hf.remote(directory) for worker in self._workers]
        await self._checkpoint(refs, f"the export to {directory}")

    def close(self) -> None:
        """Kills the ranks; they hold nothing that is not on disk or on the driver."""
        for worker in self._workers:
            ray.kill(worker)

    async def _weights(self, refs: Sequence[Any], what: str) -> list[Any]:
        return await wait_for_ranks(refs, self._cfg.weight_sync.timeout_s, what, "weight_sync.timeout_s")

    async def _checkpoint(self, refs: Sequence[Any], what: str) -> list[Any]:
        return await wait_for_ranks(refs, self._cfg.checkpoint.timeout_s, what, "checkpoint.timeout_s")
