"""Runs vLLM engines as Ray actors; the driver-side pool speaks for all of them.

In: one prompt, a `Sampling` and n seeds per group. Out: n `Response` records with the engine's own log-probabilities.
Each response is one engine request with its own seed: a result depends on neither batch, order nor restart.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import numpy as np
import ray

from dapo.derived import gpus_per_engine
from dapo.types import Int32Array, Response, Sampling, VersionSpan
from workers.capacity import EngineSize, FleetCapacity
from workers.remote import RemoteError, wait, wait_for_all, wait_for_stream
from workers.weights.bucket import BACKEND, Bucket

ABORT_PAUSE_S = 0.002
TOGETHER_S = 0.005  # responses of a group that end within this travel together


class RolloutWorker:
    """Runs one engine. Every method runs on the actor's event loop; `start` comes first."""

    async def start(self, model_path: str, engine_args: dict[str, Any]) -> EngineSize:
        """Loads the model."""
        from vllm import AsyncEngineArgs
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(
            model=model_path,
            logprobs_mode="processed_logprobs",  # the default, raw, is wrong for temperature != 1 or top_p < 1
            worker_extension_cls="workers.weights.receiver.WeightReceiverExtension",
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            **engine_args,
        )
        self._engine = AsyncLLM.from_engine_args(args)
        await self._engine.update_weight_version("0")
        self._decode = self._engine.get_tokenizer().decode
        self._running: dict[str, list[str]] = {}
        config = self._engine.vllm_config
        return EngineSize(
            sequences=config.scheduler_config.max_num_seqs,
            kv_tokens=(config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
            window=config.model_config.max_model_len,
        )

    async def generate(
        self, key: str, prompt: Int32Array, sampling: Sampling, seeds: Sequence[int]
    ) -> AsyncIterator[list[tuple[int, Response]]]:
        """Yields responses to one prompt [P] with their numbers, as they end; those that end together come together.

        After `abort(key)` the unfinished ones come with reason "abort".
        """
        self._running[key] = [f"{key}-{sample}" for sample in range(sampling.n)]
        token_ids = prompt.tolist()
        requests = zip(self._running[key], seeds, strict=True)
        tasks = {
            asyncio.ensure_future(self._generate_one(name, token_ids, sampling, seed)): sample
            for sample, (name, seed) in enumerate(requests)
        }
        try:
            while tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if len(tasks) > 1:
                    await asyncio.sleep(TOGETHER_S)
                yield [(tasks.pop(task), task.result()) for task in list(tasks) if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            del self._running[key]

    async def _generate_one(self, request_id: str, prompt: list[int], sampling: Sampling, seed: int) -> Response:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=seed,
            logprobs=0,  # the sampled token's only
            flat_logprobs=True,
            detokenize=False,  # once at the end is far cheaper than token by token
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params, request_id):
            completion = output.outputs[0]
        return Response(
            token_ids=np.asarray(completion.token_ids, dtype=np.int32),
            rollout_logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),
            text=self._decode(completion.token_ids, skip_special_tokens=True),
            finish_reason=completion.finish_reason,
            policy_versions=tuple(
                VersionSpan(version=int(span.version), start=span.start, end=span.end)
                for span in completion.weight_versions or ()
            ),
        )

    async def abort(self, keys: list[str]) -> None:
        """Ends the named groups; their `generate` calls return what was sampled so far."""
        await self._engine.abort([request for key in keys for request in self._running.get(key, [])])

    async def connect_weights(self, info: dict[str, Any]) -> None:
        """Opens the engine's end of the weight sync. info: fields of `workers.weights.receiver.BucketInitInfo`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def start_update(self) -> None:
        """Holds all requests; each goes on where it stood after `finish_update`.

        They would keep stale keys and values: `clear_cache` recomputes these.
        """
        await self._engine.pause_generation(mode="keep", clear_cache=True)
        await self._engine.start_weight_update()

    async def load_bucket(self, bucket: Bucket) -> None:
        """Takes the next bucket from the transport and loads it."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = {
            "index": bucket.index,
            "tensors": [(place.name, place.shape, place.start) for place in bucket.plan.tensors],
            "num_bytes": bucket.plan.num_bytes,
            "dtype": bucket.dtype,
            "digest": bucket.digest,
        }
        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def finish_update(self, version: int) -> None:
        """Labels all later tokens with `version` and lets requests go on."""
        await self._engine.finish_weight_update(weight_version=str(version))
        await self._engine.resume_generation()

    async def stop(self) -> None:
        """Ends the engine's processes; without a timeout vLLM would give running requests seconds to finish."""
        self._engine.shutdown(timeout=0.5)


class RolloutPool:
    """Speaks for all engines on the driver. A group goes to the engine with the fewest running responses."""

    def __init__(self, options: list[dict[str, Any]], *, start_timeout_s: float, timeout_s: float) -> None:
        """Makes the engines' actors. options: Ray options of each engine, from `workers.cluster`."""
        worker: Any = ray.remote(RolloutWorker)
        self._workers = [worker.options(max_concurrency=4096, **each).remote() for each in options]
        self._load = [0] * len(self._workers)
        self._home: dict[str, int] = {}
        self._start_timeout_s = start_timeout_s
        self._timeout_s = timeout_s
        self._fleet = FleetCapacity([])
        self._processes, self._refused = 1, ""  # of one engine; why the engines may serve nothing any more

    async def start(self, model_path: str, engine_args: dict[str, Any]) -> None:
        """Starts all engines side by side."""
        refs = [worker.start.remote(model_path, engine_args) for worker in self._workers]
        sizes = await wait(refs, self._start_timeout_s, "the vLLM engines to start", "rollout.start_timeout_s")
        self._fleet = FleetCapacity(sizes)
        self._processes = gpus_per_engine(engine_args)

    @property
    def capacity(self) -> int:
        """Counts the responses that all engines together run at once."""
        return self._fleet.responses

    def room(self, n: int) -> int:
        """Counts the groups of n responses that may start now, so that all engines are full and each has a group
        waiting."""
        return max(0, (self.capacity + len(self._workers) * n - sum(self._load)) // n)

    async def generate(
        self, key: str, prompt: Int32Array, sampling: Sampling, seeds: Sequence[int]
    ) -> AsyncGenerator[tuple[int, Response]]:
        """Yields the responses to one prompt as they end, each with its number; `key` names the group for `abort`."""
        if self._refused:
            raise RemoteError(self._refused)
        home = self._load.index(min(self._load))
        running = sampling.n
        self._load[home] += running
        self._home[key] = home
        try:
            parts = self._workers[home].generate.options(num_returns="streaming").remote(key, prompt, sampling, seeds)
            what = f"group {key} from engine {home}"
            async for part in wait_for_stream(parts, self._timeout_s, what, "rollout.timeout_s"):
                running -= len(part)
                self._load[home] -= len(part)
                for _, response in part:
                    self._fleet.observe(len(prompt), len(response.token_ids))
                for each in part:
                    yield each
        finally:
            self._load[home] -= running
            del self._home[key]

    async def abort(self, keys: list[str]) -> None:
        """Ends the named groups wherever they run; returns when none of them does.

        An engine knows a request only some time after it was asked for it, and ignores to end an unknown one: asked
        again until all are gone.
        """
        pause = ABORT_PAUSE_S
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while left := [key for key in keys if key in self._home]:
            refs = [
                worker.abort.remote(here)
                for index, worker in enumerate(self._workers)
                if (here := [key for key in left if self._home[key] == index])
            ]
            await wait(refs, self._timeout_s, "the engines to abort surplus groups", "rollout.timeout_s")
            if asyncio.get_running_loop().time() > deadline:
                raise RemoteError(f"the engines did not end {left} within {self._timeout_s:g} s (`rollout.timeout_s`)")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.2)

    @property
    def num_receivers(self) -> int:
        """Counts the processes of all engines together, each of which holds a part of the weights."""
        return len(self._workers) * self._processes

    async def connect_weights(self, info: dict[str, Any], timeout_s: float) -> None:
        """Opens the engines' ends, while the actors open theirs. info: fields of `BucketInitInfo` but first_rank."""
        ranks = range(1, 1 + self.num_receivers, self._processes)
        refs = [w.connect_weights.remote(info | {"first_rank": k}) for w, k in zip(self._workers, ranks, strict=True)]
        await self._all(refs, timeout_s, "to open the weight sync")

    async def start_update(self, timeout_s: float) -> None:
        """Holds all requests until `finish_update`."""
        await self._all([worker.start_update.remote() for worker in self._workers], timeout_s, "to pause")

    async def load_bucket(self, bucket: Bucket, what: str, timeout_s: float) -> None:
        """Loads the next bucket on every engine. what: which one of which sync, for errors."""
        refs = [worker.load_bucket.remote(bucket) for worker in self._workers]
        await self._all(refs, timeout_s, f"to load {what}")

    async def finish_update(self, version: int, timeout_s: float) -> None:
        """Lets all engines serve `version`, unless a parameter is missing."""
        refs = [worker.finish_update.remote(version) for worker in self._workers]
        await self._all(refs, timeout_s, f"to serve version {version}")

    def refuse(self, reason: str) -> None:
        """Generates nothing from now on: an engine may hold a mixture of two versions, and stays paused."""
        self._refused = reason

    async def _all(self, refs: list[Any], timeout_s: float, what: str) -> None:
        key = "weight_sync.timeout_s"
        await wait_for_all(wait([ref], timeout_s, f"engine {k} {what}", key) for k, ref in enumerate(refs))

    async def stop(self, grace_s: float) -> None:
        """Lets the engines end their processes for `grace_s`, then kills what is left."""
        await asyncio.wait([asyncio.ensure_future(worker.stop.remote()) for worker in self._workers], timeout=grace_s)
        for worker in self._workers:
            ray.kill(worker)
