"""Trains the policy on FSDP2 ranks, with a driver-side pool that calls them all. Takes `TrainBatch`es with advantages
and token weights; produces metrics, checkpoints, and full weights for the engines."""

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from dapo.algorithm.mismatch import Variant
from dapo.algorithm.own.loading import Source, load, source_of
from dapo.config.derived import LENT_TRANSPORT, num_shards, shares_prompts, transfer_timeout_s
from dapo.config.node_environment import check_allocator
from dapo.config.schema import Config
from dapo.ground.console import say, warn
from dapo.ground.fault_points import fault_point
from dapo.ground.restarts import Restarts
from dapo.pools import ActorsLost, BatchRefused, Kept, Updated
from dapo.types import Float32Array, TrainBatch, TrainSequence, UInt8Array
from dapo.workers.remote import RemoteError, wait
from dapo.workers.training import fsdp, mesh
from dapo.workers.training.batch_split import (
    MicroBatches,
    RankWork,
    equal_at,
    known_shape,
    split_batch,
    split_sequences,
)
from dapo.workers.training.collective_errors import OwnWork, RankVersion
from dapo.workers.training.files import state
from dapo.workers.training.forward.attention import choose_kernel
from dapo.workers.training.optimizer import Moments, build_optimizer
from dapo.workers.training.processes import RankProcess, free_address, give_way, own_process
from dapo.workers.training.ranks import Ranks, Submit
from dapo.workers.training.update import NonFiniteError, Updater
from dapo.workers.training.update_metrics import WeightParityError, begin_use, end_use, rank_metrics
from dapo.workers.weights.bucket import STORE, WORD_BYTES, Bucket, Endpoint, digest
from dapo.workers.weights.sender import WeightSender

BESIDE = "beside"  # Ray's concurrency group of calls to a rank that may hang in a broadcast
THREAD = "files"  # Ray's concurrency group of writing in a thread
WRITING = "writing"  # Ray's concurrency group of waiting for writes to the weight store
CLOSE_S = 5.0
COLLECTIVE_S = 600.0  # longest timeout of one collective: a rank that is later will hardly ever arrive


class ActorWorker:
    """One FSDP rank, a Ray actor. Every method except `process`, `read_file`, `free_address`, `hold` and
    `close_weights` is a collective over all ranks. It tracks the policy version of its weights, and whether they are
    consistent."""

    def __init__(self, cfg: Config, device: str, own_loss: Source | None = None) -> None:
        self._cfg, self._device, self._own_loss = cfg, device, own_loss

    def process(self) -> RankProcess:
        return own_process()

    def read_file(self, path: str) -> tuple[str, str]:
        """Returns this node's address, and the file's text or why it cannot be read."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            text = f"{type(error).__name__}: {error}"
        return ray.util.get_node_ip_address(), text

    def free_address(self) -> tuple[str, int]:
        return free_address()

    def start(self, rank: int, world_size: int, master_addr: str, master_port: int) -> tuple[str, str]:
        """Joins the other ranks and loads the model. Returns how it computes, and what is not as it was asked for."""
        check_allocator(self._cfg, self._device)
        if self._device == "cpu" or self._cfg.actor.offload == "host":  # Ray sets one thread for a process with a GPU
            torch.set_num_threads(self._cfg.actor.cpu_threads)
        self._rank, limit_s = rank, min(self._cfg.actor.timeout_s, COLLECTIVE_S)
        mesh.join(
            self._device, rank=rank, world_size=world_size, address=master_addr, port=master_port, timeout_s=limit_s
        )
        return self._build()

    def _build(self) -> tuple[str, str]:
        cfg = self._cfg
        kernel = choose_kernel(cfg.model.attn_implementation, self._device)
        self._mesh = mesh.arrange(
            self._device,
            timeout_s=min(cfg.actor.timeout_s, COLLECTIVE_S),
            files_timeout_s=cfg.checkpoint.timeout_s,
            fsdp_size=cfg.actor.fsdp_size,
            sequence_parallel_size=cfg.actor.ulysses_sequence_parallel_size,
        )
        self._policy = fsdp.load_policy(cfg, self._mesh)
        self._release = partial(fsdp.release, self._policy, cfg, self._mesh)  # to an engine on the same GPU
        self._optimizer = build_optimizer(self._policy, cfg)
        self._moments = Moments(self._optimizer, self._device, moves=cfg.actor.offload == "phase")
        kl = cfg.algorithm.kl
        reference = fsdp.load_reference(cfg, self._mesh, self._policy) if kl.loss_coeff or kl.reward_coeff else None
        own_loss = None if self._own_loss is None else load(self._own_loss)
        self._updater = Updater(self._policy, reference, self._optimizer, cfg, self._mesh, own_loss)
        self._version = RankVersion()
        self._senders: dict[str, WeightSender] = {}  # by transport
        how, failure, compiled = [f"attention by {kernel}"] if kernel else [], "", self._policy.compiled
        if compiled is not None:
            began = time.monotonic()
            self._updater.warm_up()
            failure = compiled.failure
            how.append(f"layers compiled in {time.monotonic() - began:.0f} s" if not failure else "layers not compiled")
        return ", ".join(how), failure

    def update(self, work: RankWork) -> Updated:
        """Trains on this rank's share, which advances the policy version by one. Metrics are over all ranks. Raises
        Unanimous with nothing changed; after any other error the state must not be saved."""
        fault_point("actor.update")
        self._version.check("an update", work.version)
        what = f"the update from policy version {work.version}"
        with self._version.changing(what, to=work.version + 1, or_nothing=True):
            begin_use(self._device)
            try:
                with self._moments.on_device():
                    updated = self._updater.update(work.version, work.minibatches, work.order)
            finally:
                self._release()
            return replace(updated, use=end_use(self._device))

    def logprobs(self, micro_batches: MicroBatches, *, reference: bool) -> list[Float32Array]:
        """Returns [R] for every sequence, by the policy or the reference policy, in the order of the micro-batches."""
        compute = self._updater.reference_logprobs if reference else self._updater.policy_logprobs
        try:
            return [values.numpy() for of_micro_batch in compute(micro_batches) for values in of_micro_batch]
        finally:
            self._release()

    def probe(self, micro_batches: MicroBatches, variant: Variant) -> list[Float32Array]:
        """Returns [R, 1 + K] for every sequence (`Updater.probe`), in the order of the micro-batches."""
        try:
            found = self._updater.probe(micro_batches, variant)
            return [values.numpy() for of_micro_batch in found for values in of_micro_batch]
        finally:
            self._release()

    def open_weights(self, transport: str) -> tuple[int, Endpoint | None]:
        """Returns the number of buckets of a weight sync, and this rank's endpoint of the transport if it has one."""
        sender = self._senders[transport] = self._senders.get(transport) or WeightSender(
            lambda: fsdp.full_parameters(self._policy, self._mesh, getattr(torch, self._cfg.model.dtype)),
            fsdp.full_shapes(self._policy.model),
            dtype=self._cfg.model.dtype,
            bucket_bytes=self._cfg.weight_sync.bucket_bytes,
            rank=self._rank,
            device=torch.device(self._device, 0),
            readers=self._cfg.rollout.engines_per_gpu,
            store=self._cfg.weight_sync.store,
        )
        endpoint = sender.open(transport, ray.util.get_node_ip_address(), transfer_timeout_s(self._cfg))
        return sender.num_buckets, endpoint

    def join_weights(self, transport: str, num_receivers: int) -> None:
        self._senders[transport].join(num_receivers)

    def gather_bucket(self, transport: str, index: int) -> Bucket | None:
        """Starts sending the next bucket of weights to the engines and returns it; None on all ranks but 0."""
        fault_point("actor.gather")
        self._version.check("a weight sync")
        sender = self._senders[transport]
        bucket = sender.gather(index)
        # GPU memory is freed only after the broadcast, which engines receive after this returns.
        if index + 1 == sender.num_buckets and transport == LENT_TRANSPORT:
            self._release()
        return bucket

    def stored_weights(self, others: Collection[str]) -> list[tuple[str, str]]:
        """Waits until the weight store has the last version, concurrently with other calls; see
        `StoreTransport.written`."""
        return self._senders[STORE].stored(others)

    def close_weights(self, transport: str) -> None:
        """Disconnects from the engines, concurrently with other calls; ends a broadcast that this rank is stuck in."""
        if sender := self._senders.get(transport):
            sender.close()

    def save(self, directory: str, version: int) -> None:
        """Writes model and optimizer into `directory`. The actors have no other state and draw no random numbers.
        Raises Unanimous if the weights are not those of policy `version` or a rank could not write, RuntimeError if
        replicas of the parameters (HSDP) differ."""
        fault_point("actor.save")
        self._version.check("a checkpoint", version)
        state.save_state(self._policy, self._optimizer, self._updater.scale, self._mesh, directory)

    def stage(self, version: int, *, export: bool) -> None:
        """Copies to host memory what `save` and, with `export`, `export_hf` write; raises as `save` does."""
        fault_point("actor.save")
        self._version.check("a checkpoint", version)
        scale, dtype = self._updater.scale, getattr(torch, self._cfg.model.dtype) if export else None
        self._staged: state.Snapshot | None = None  # frees the memory of an abandoned snapshot first
        self._staged = state.take_snapshot(self._policy, self._optimizer, scale, self._mesh, export=dtype)
        self._release()

    def write_staged(self, directory: str, export: str) -> None:
        """Writes what `stage` copied, in a separate thread. Raises Unanimous if a rank could not write."""
        fault_point("actor.write")
        give_way()
        snapshot, self._staged = self._staged, None
        assert snapshot is not None, "stage comes first"
        state.write_snapshot(snapshot, self._policy, self._mesh, self._cfg.model, directory, export)

    def load(self, directory: str, version: int) -> None:
        """Reads what `save` wrote, on any number of ranks, and sets the policy version."""
        with self._version.changing(f"loading {directory}", to=version, or_nothing=False):
            self._optimizer.zero_grad()  # of an update that failed
            self._updater.scale.forget()
            state.load_state(self._policy, self._optimizer, self._updater.scale, directory)
            self._moments.to_host()
            self._release()

    def copy(self, version: int) -> tuple[list[str], list[UInt8Array]]:
        """Returns digests and bytes of this rank's part of the state. As a return value they lie in the memory of its
        node and belong to the driver: they outlive this process. Raises as `save` does."""
        fault_point("actor.copy")
        self._version.check("a copy", version)
        fsdp.check_copies(self._policy, self._mesh)
        parts = [*state.own_tensors(self._policy, self._optimizer), *self._updater.scale.state().values()]
        return [_digest(part) for part in parts], [_bytes(part).cpu().numpy() for part in parts]

    def hold(self, copied: list[UInt8Array]) -> tuple[None, list[UInt8Array]]:
        """Returns the bytes of another rank, so that they lie in the memory of this node too."""
        return None, copied

    def restore(self, version: int, sources: Sequence[tuple[list[str], Any]]) -> int:
        """Takes the state of policy `version` from the first source, digests and Ray's reference of what `copy` has
        returned, that can be read and is whole; returns its number. Raises Unanimous if some rank has none."""
        with self._version.changing(f"restoring policy version {version}", to=version, or_nothing=False):
            self._optimizer.zero_grad()  # of an update that failed
            self._updater.scale.forget()
            own, number = OwnWork(), -1
            with own:
                number = self._take(sources)
            own.meet(f"policy version {version} could not be restored")
            self._release()
        return number

    @torch.no_grad()
    def _take(self, sources: Sequence[tuple[list[str], Any]]) -> int:
        scale, why = self._updater.scale.state(), ""
        parts = [*state.own_tensors(self._policy, self._optimizer), *scale.values()]
        for number, (digests, copied) in enumerate(sources):
            try:
                for part, data in zip(parts, ray.get(copied, timeout=self._cfg.checkpoint.timeout_s / 4), strict=True):
                    _bytes(part).copy_(torch.tensor(data))
            except (RayError, RuntimeError, ValueError) as error:
                why = f"{type(error).__name__}: {error}".partition("\n")[0]
                continue
            if [_digest(part) for part in parts] == digests:
                if scale:
                    self._updater.scale.load(scale)
                return number
            why = "its digests differ"
        raise RuntimeError(f"none of {len(sources)} copies of its state is whole ({why})")

    def export_hf(self, directory: str) -> None:
        """Writes configuration, tokenizer and safetensors, on rank 0."""
        self._version.check("an export")
        try:
            state.export_hf(self._policy, self._mesh, self._cfg.model, directory)
        finally:
            self._release()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _digest(tensor: torch.Tensor) -> str:
    data = _bytes(tensor)
    return digest(data if len(data) % WORD_BYTES == 0 else torch.nn.functional.pad(data, (0, -len(data) % WORD_BYTES)))


class ActorPool:
    """Calls all FSDP ranks as one; each call has a configured deadline. Every method raises RemoteError if all ranks
    raised alike; then nothing has changed and work can go on. It raises ActorsLost if a rank died, did not answer, or
    failed differently from the others; then only `restart` works.

    save, export_hf: the ranks write, and do nothing else meanwhile. stage, write_staged: the ranks copy their state,
    and write the copy in a thread (`THREAD`) during updates. All ranks must see the directories."""

    def __init__(
        self,
        cfg: Config,
        device: str,
        place: Callable[[], Sequence[dict[str, Any]]],
        before_restart: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """place: returns Ray options of each rank, called at every start (`workers.placement.Placement`).
        before_restart: frees the GPUs for new ranks."""
        # Ray's types lack concurrency groups. Methods outside the groups still run one by one, in call order.
        remote: Any = ray.remote(concurrency_groups={THREAD: 1, BESIDE: 1, WRITING: 1})(ActorWorker)  # type: ignore[call-overload]
        own = source_of(cfg, "algorithm.policy_loss")  # as source text: the ranks' nodes need not have the file
        self._cfg = cfg
        self._ranks = Ranks(lambda: [remote.options(**option).remote(cfg, device, own) for option in place()])
        self.gpus, self.nodes, self.until_idle = self._ranks.gpus, self._ranks.nodes, self._ranks.until_idle
        self._before_restart = before_restart
        self._shards = num_shards(cfg)
        self._sequence_parallel = cfg.actor.ulysses_sequence_parallel_size  # neighbours that share work
        self._shape = known_shape(cfg.model.path)
        self._bounds = (
            cfg.actor.num_workers // self._sequence_parallel,
            cfg.actor.max_tokens_per_gpu * self._sequence_parallel,
            equal_at(self._shape),
            shares_prompts(cfg),
        )

    async def find(self) -> None:
        await self._ranks.find_processes(self._cfg.actor.start_timeout_s, "actor.start_timeout_s")

    async def start(self) -> None:
        """Loads the model on all ranks, at policy version 0. Restarts ranks that are lost meanwhile, up to
        `actor.max_restarts` times."""
        restarts = Restarts(self._cfg.actor.max_restarts)
        while True:
            try:
                return await self._load()
            except ActorsLost as error:
                if restarts.spent():
                    raise
                restarts.add()
                warn(f"the actors were lost as they started, and start again ({restarts.count()}): {error}")
            await self._ranks.restart("actor.start_timeout_s")

    async def _load(self) -> None:
        timeout_s, key = self._cfg.actor.start_timeout_s, "actor.start_timeout_s"
        await self.find()
        [(address, port)] = await wait([self._ranks.workers[0].free_address.remote()], timeout_s, "actor rank 0", key)
        count, what = len(self._ranks.workers), "loading the model"
        start: Submit = lambda rank, worker: worker.start.remote(rank, count, address, port)  # noqa: E731
        started = await self._ranks.call(start, timeout_s, what, key, separable=True)
        if how := started[0][0]:
            say(f"actors: {how}")
        for failure in dict.fromkeys(failure for _, failure in started if failure):
            warn(f"`actor.compile`: torch.compile fails, and the layers are computed without it: {failure}")

    def restarts(self) -> dict[str, float]:
        return {"perf/restarted_actors": float(self._ranks.restarts)}

    async def restart(self) -> None:
        """Kills all ranks and starts new ones at version 0, on another node if a node was lost."""
        if self._before_restart is not None:
            await self._before_restart()
        await self._ranks.restart("actor.start_timeout_s")
        await self._load()

    async def until_lost(self) -> str:
        return await self._ranks.until_lost(self._cfg.actor.timeout_s, "actor.timeout_s")

    async def update(self, batch: TrainBatch) -> Updated:
        """Trains on a batch, one optimizer step per entry of its order; returns metrics over all ranks and steps.
        Raises BatchRefused if a retry would fail again. Cancelling the wait loses the actors."""
        works = [ray.put(work) for work in split_batch(batch, *self._bounds)]
        what = f"the update from policy version {batch.version}"
        began = time.monotonic()
        try:
            updated: list[Updated] = await self._ranks.call(
                lambda rank, worker: worker.update.remote(works[rank // self._sequence_parallel]),
                self._cfg.actor.timeout_s,
                what,
                "actor.timeout_s",
                changes=True,
            )
        except RemoteError as error:
            reasons = {WeightParityError: "parity", NonFiniteError: "nonfinite"}
            if reason := reasons.get(type(error.__cause__)):  # type: ignore[arg-type]
                raise BatchRefused(reason, str(error)) from error
            raise
        uses = [each.use for each in updated if each.use is not None]
        seconds = time.monotonic() - began
        metrics = rank_metrics(uses, batch, seconds, self._shape, lora=self._cfg.model.lora.rank > 0)
        return replace(updated[0], metrics=updated[0].metrics | metrics)

    async def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
        return await self._logprobs(
            sequences, lambda worker, share: worker.logprobs.remote(share, reference=True), "the reference policy's"
        )

    async def policy_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
        return await self._logprobs(
            sequences, lambda worker, share: worker.logprobs.remote(share, reference=False), "the policy's"
        )

    async def probe(self, sequences: Sequence[TrainSequence], variant: Variant) -> list[Float32Array]:
        """Returns [R, 1 + K] per sequence, see `Updater.probe`."""
        return await self._logprobs(
            sequences, lambda worker, share: worker.probe.remote(share, variant), "a variant of the policy's"
        )

    async def _logprobs(
        self, sequences: Sequence[TrainSequence], submit: Callable[[Any, Any], Any], whose: str
    ) -> list[Float32Array]:
        """Returns log-probabilities of the response tokens, per sequence, in order. submit: (worker, its share)."""
        shares, in_order = split_sequences(sequences, *self._bounds)
        works = [ray.put(share) for share in shares]
        results = await self._ranks.call(
            lambda rank, worker: submit(worker, works[rank // self._sequence_parallel]),
            self._cfg.actor.timeout_s,
            f"{whose} log-probabilities",
            "actor.timeout_s",
        )
        return in_order(results[:: self._sequence_parallel])

    async def check_shared(self, path: str, content: str) -> None:
        answers = await self._checkpoint(lambda _, worker: worker.read_file.remote(path), f"reading {path}")
        if others := {f"{host} ({text[:200]})": None for host, text in answers if text != content}:
            raise RemoteError(
                f"`trainer.output_dir`: actor ranks on {', '.join(others)} do not see {path} as the driver has written "
                "it; give a directory on a file system that all nodes share"
            )

    async def save(self, directory: str, version: int) -> None:
        """Writes the state of policy `version` into `directory`. Raises RemoteError also if the weights are of another
        version, ActorsLost also if parameter copies differ."""
        await self._checkpoint(lambda _, worker: worker.save.remote(directory, version), f"saving {directory}")

    async def stage(self, version: int, *, export: bool) -> None:
        """Copies the state for one `write_staged`; a model to export is on rank 0. Raises as `save` does."""
        what = f"copying policy version {version} to host memory"
        await self._checkpoint(lambda _, worker: worker.stage.remote(version, export=export), what)

    async def write_staged(self, directory: str, export: str) -> None:
        await self._checkpoint(
            lambda _, worker: worker.write_staged.options(concurrency_group=THREAD).remote(directory, export),
            f"saving {directory}",
            beside=True,
        )

    async def load(self, directory: str, version: int) -> None:
        await self._checkpoint(lambda _, worker: worker.load.remote(directory, version), f"loading {directory}")

    async def keep(self, version: int) -> Kept:
        """Returns copies in the memory of the nodes: of each rank on its own, and on another one as well if
        `checkpoint.memory_copies` is 2. Raises as `save` does, but RemoteError also if ranks failed differently: a node
        may have neither memory nor disk left."""
        what, nodes = f"copying policy version {version} to the nodes' memory", self._ranks.nodes()
        count = len(nodes)
        copied: dict[int, Any] = {}  # Ray's references, by rank
        held: dict[int, Any] = {}

        def copy(rank: int, worker: Any) -> Any:
            done, copied[rank] = worker.copy.options(num_returns=2).remote(version)
            return done

        def hold(rank: int, worker: Any) -> Any:
            of = (rank + shift) % count  # its state, for another node
            done, held[of] = worker.hold.options(num_returns=2).remote(copied[of])
            return done

        digests = await self._checkpoint(copy, what, separable=True)
        alike = [[(rank + k) % count for k in range(0, count, self._shards)] for rank in range(count)]  # itself first
        # One shift for all ranks, so that each holds the copy of one; 0 if there is only one node.
        away = [sum(nodes[rank] != nodes[rank - by] for rank in range(count)) for by in range(count)]
        shift = away.index(max(away))
        alone = any(len({nodes[k] for k in ranks}) == 1 for ranks in alike)
        if self._cfg.checkpoint.memory_copies > 1 and shift and alone:
            await self._checkpoint(hold, what, separable=True)
        sources = [[(digests[k], of[k]) for of in (copied, held) for k in ranks if k in of] for ranks in alike]
        return Kept(version=version, sources=sources)

    async def restore(self, kept: Kept) -> str:
        restore: Submit = lambda rank, worker: worker.restore.remote(kept.version, kept.sources[rank])  # noqa: E731
        numbers = await self._checkpoint(restore, f"restoring policy version {kept.version}")
        others = [rank for rank, number in enumerate(numbers) if number]
        return f"ranks {', '.join(map(str, others))} from other copies than their own" if others else "own copies"

    async def export_hf(self, directory: str) -> None:
        await self._checkpoint(lambda _, worker: worker.export_hf.remote(directory), f"the export to {directory}")

    async def _checkpoint(self, submit: Submit, what: str, **how: bool) -> list[Any]:
        return await self._ranks.call(submit, self._cfg.checkpoint.timeout_s, what, "checkpoint.timeout_s", **how)

    async def open_weights(self, transport: str) -> tuple[int, list[Any]]:
        """Returns the number of buckets of a weight sync, and each rank's endpoint of the transport."""
        opened = await self._weights(lambda _, worker: worker.open_weights.remote(transport), "opening the weight sync")
        return opened[0][0], [endpoint for _, endpoint in opened]

    async def join_weights(self, transport: str, num_receivers: int) -> None:
        join: Submit = lambda _, worker: worker.join_weights.remote(transport, num_receivers)  # noqa: E731
        await self._weights(join, "meeting the engines for the weight sync")

    async def gather_bucket(self, transport: str, index: int, what: str) -> Any:
        """Starts sending the next bucket of weights and returns it. what: the bucket and sync, for errors."""
        gather: Submit = lambda _, worker: worker.gather_bucket.remote(transport, index)  # noqa: E731
        return (await self._weights(gather, f"gathering {what}"))[0]

    async def stored_weights(self, others: Collection[str]) -> list[tuple[str, str]]:
        """Waits until the weight store has the version that was gathered last. Returns digest and name of each bucket.
        others: names of buckets that must stay too."""
        call = self._ranks.workers[0].stored_weights.options(concurrency_group=WRITING)
        limit_s, key = self._cfg.weight_sync.timeout_s, "weight_sync.timeout_s"
        [found] = await wait([call.remote([*others])], limit_s, "actor rank 0 to write to the weight store", key)
        return list(found)

    async def close_weights(self, transport: str) -> None:
        """Makes rank 0 drop its connection to the engines, also while it is busy; the next sync opens a new one. A rank
        that fails to do so is detected by the next call to it."""
        close = self._ranks.workers[0].close_weights.options(concurrency_group=BESIDE)
        with suppress(RemoteError):
            await wait([close.remote(transport)], CLOSE_S, "actor rank 0 to let go of the engines", "")

    async def _weights(self, submit: Submit, what: str) -> list[Any]:
        # Separable: a transport may fail on rank 0 alone, when an engine is lost, after all have gathered the bucket.
        # Less than the timeout of the sync, which cannot tell a hanging rank from a hanging engine.
        timeout_s = min(self._cfg.weight_sync.timeout_s, 2 * transfer_timeout_s(self._cfg))
        return await self._ranks.call(submit, timeout_s, what, "weight_sync.timeout_s", separable=True)

    def close(self) -> None:
        self._ranks.kill()
