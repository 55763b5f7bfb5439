"""A Ray actor that runs one vLLM engine. Each response is one engine request with its own seed, so a result does not
depend on batch, order or restart."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np
import ray
from packaging.specifiers import SpecifierSet

from dapo.sampling.seeds import continued_seed
from dapo.types import LEAST_LOGPROB, Float32Array, Int32Array, Response, Sampling, Support, VersionSpan
from dapo.workers.capacity import EngineSize
from dapo.workers.engines.arguments import CPU_EXPERTS_SCHEDULER, DRAWN
from dapo.workers.engines.life import LifeSigns, Pulse, Statistics
from dapo.workers.engines.orphans import ACTOR
from dapo.workers.remote import WorkerLost
from dapo.workers.weights.bucket import BACKEND, Bucket

T = TypeVar("T")
_numbers = count()  # unique request ids, as vLLM requires
SCHEDULER = "dapo.workers.engines.scheduling.scheduler"
KNOWN = ">=0.32,<0.34"  # vLLM versions; same as the extras in pyproject.toml
TOGETHER_S = 0.005  # responses of a group that end within this time are returned together
NEGLIGIBLE_LOGPROB = -14.0  # a probability of 1e-6
ENDING_S = 1.0  # grace time of aborted groups: for their last tokens, and before the engine refuses to sleep


def check_version() -> None:
    """Raises RuntimeError for a vLLM version outside `KNOWN`: much of the API used here is private or unstable."""
    import vllm

    if not SpecifierSet(KNOWN).contains(vllm.__version__, prereleases=True):
        raise RuntimeError(
            f"vLLM {vllm.__version__} is installed; dapo knows {KNOWN}: install the version that docker/cpu.lock or "
            "docker/gpu.lock pins"
        )


def size_of(config: Any, measured: Sequence[int]) -> EngineSize:
    """config: vLLM's. measured: bytes available for KV cache on each GPU."""
    return EngineSize(
        sequences=config.scheduler_config.max_num_active_seqs or config.scheduler_config.max_num_seqs,
        kv_tokens=(config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
        window=config.model_config.max_model_len,
        cache_bytes=min(measured),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where an engine starts generating a response. token_ids: [K], the response tokens so far, which follow the prompt
    and count towards the length limit. seed: of its first token."""

    token_ids: Int32Array
    seed: int

    def num_routed(self, prompt_length: int) -> int:
        """Number of tokens whose experts are known: all that the engine before this one has computed."""
        return prompt_length + len(self.token_ids) - 1 if len(self.token_ids) else 0


class RolloutWorker:
    """One engine. Every method runs on the actor's event loop; `start` must be called first."""

    async def start(self, model_path: str, engine_args: dict[str, Any], gpus: Sequence[str] = ()) -> EngineSize:
        """Loads the model. gpus: GPUs of this node to use; empty: those that Ray assigned to this process."""
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        os.environ[ACTOR] = str(os.getpid())
        check_version()
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.envs import enable_envs_cache
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(
            model=model_path,
            logprobs_mode="processed_logprobs",  # the default, raw, is wrong for temperature != 1 or top_p < 1
            worker_extension_cls="dapo.workers.engines.extension.EngineExtension",
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            # `LifeSigns` needs the statistics.
            **{"scheduler_cls": SCHEDULER} | engine_args | {"disable_log_stats": False},
        )
        self._life = LifeSigns()
        self._engine = AsyncLLM.from_engine_args(args, stat_loggers=[lambda *_: Statistics(self._life)])
        if args.scheduler_cls == CPU_EXPERTS_SCHEDULER:
            await self._engine.collective_rpc("add_experts")
        config = self._engine.vllm_config
        # vLLM's V2 runner (CUDA) draws random numbers by seed and position, its V1 runner from a generator per request.
        on_cpu = config.device_config.device_type == "cpu"
        self._goes_on = config.speculative_config is None and (on_cpu or config.use_v2_model_runner)
        if on_cpu and self._goes_on:
            await self._engine.collective_rpc("go_on_with_noise")
        self._life.meter.started()
        enable_envs_cache()  # otherwise each token reads the environment again, a quarter of this process's work
        await self._engine.update_weight_version("0")
        self._decode = self._engine.get_tokenizer().decode
        self._vocabulary = self._engine.vllm_config.model_config.get_vocab_size()
        self._running: dict[str, list[str]] = {}
        self._version, self._keeps = 0, False  # _keeps: running requests may have keys of weights before `_version`
        # _stirring: the weights are awake for a sync, the rest sleeps. _paused: for a sync.
        self._asleep = self._stirring = self._paused = False
        size = size_of(config, await self._engine.collective_rpc("measured_cache_bytes"))
        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        return replace(size, goes_on=self._goes_on, node=node)

    async def pulse(self) -> Pulse:
        """Returns the engine's state. Raises WorkerLost if its process has ended or it is unusable."""
        return await self._life.pulse(self._engine, sum(map(len, self._running.values())))

    async def generate(
        self, key: str, prompt: Int32Array, sampling: Sampling, starts: Sequence[Start]
    ) -> AsyncIterator[list[tuple[int, Response]]]:
        """Yields responses to one prompt [P] with their numbers, as they end, in small batches. A response holds the
        tokens after its `Start`; its `text` covers all tokens, and is empty if it was aborted. After `abort(key)` the
        unfinished ones are yielded with reason "abort". A group of the same key that still runs is abandoned, and is
        aborted."""
        if former := self._running.get(key):
            await self._engine.abort(former)
        names = self._running[key] = [f"{key}-{sample}-{next(_numbers)}" for sample in range(sampling.n)]
        token_ids = prompt.tolist()
        requests = zip(names, starts, strict=True)
        tasks = {
            asyncio.ensure_future(self._generate_one(name, token_ids, sampling, start)): sample
            for sample, (name, start) in enumerate(requests)
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
            if self._running.get(key) is names:
                del self._running[key]

    async def _generate_one(self, request_id: str, prompt: list[int], sampling: Sampling, start: Start) -> Response:
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens - len(start.token_ids),
            seed=start.seed if self._goes_on else continued_seed(start.seed, len(start.token_ids)),
            extra_args={DRAWN: len(start.token_ids)},
            # 0: the sampled token's only
            logprobs=min(sampling.support, self._vocabulary) if sampling.logprobs else None,
            flat_logprobs=True,
            routed_experts_prompt_start=start.num_routed(len(prompt)),
            detokenize=bool(sampling.stop),  # once at the end is far cheaper than token by token
            output_kind=RequestOutputKind.FINAL_ONLY,
            **({"stop": [*sampling.stop], "include_stop_str_in_output": True} if sampling.stop else {}),
        )
        before, since = start.token_ids.tolist(), self._version
        # The salt: keys of a prefix are shared only by requests that begin with the same weights.
        given = {"prompt_token_ids": prompt + before, "cache_salt": str(since)}
        began = time.monotonic()
        try:
            async for output in self._engine.generate(given, params, request_id):
                completion = output.outputs[0]
        except EngineDeadError:
            raise WorkerLost("its engine process has ended") from None
        decode = partial(self._decode, skip_special_tokens=True)
        logprobs, support = np.full(len(completion.token_ids), np.nan, np.float32), None
        if sampling.logprobs:  # a request that was aborted while the engine made no step may have fewer than tokens
            logprobs, support = values_of(completion.logprobs, sampling)
        whole, reason = before + list(completion.token_ids[: len(logprobs)]), completion.finish_reason
        if (end := end_of(whole, sampling.stop, decode)) is not None:
            whole, reason = whole[:end], "stop"
        length = len(whole) - len(before)
        experts = None
        if sampling.experts and length:
            experts = completion.routed_experts[: len(prompt) + len(whole) - 1 - start.num_routed(len(prompt))]
        spans = [
            VersionSpan(version=int(span.version), start=span.start, end=span.end)
            for span in completion.weight_versions or ()
        ]
        if self._keeps and spans and spans[0].version > since:  # its prompt may have keys of older weights
            spans.insert(0, VersionSpan(version=since, start=0, end=0))
        return Response(
            token_ids=np.asarray(whole[len(before) :], dtype=np.int32),
            rollout_logprobs=logprobs[:length],
            text="" if reason == "abort" else decode(whole),
            finish_reason=reason,
            policy_versions=spans_up_to(spans, length),
            engine=-1,  # the driver numbers the engines
            seconds=time.monotonic() - began,
            support=None if support is None else support.where(np.arange(len(logprobs)) < length),
            experts=experts,
        )

    async def abort(self, keys: list[str]) -> None:
        """Aborts the named groups. Their `generate` calls return all tokens sampled so far; if the engine makes no step
        now, those whose log-probabilities have arrived."""
        names = [request for key in keys for request in self._running.get(key, [])]
        if not (self._paused or self._asleep):  # `workers.engines.scheduling` ends them
            known = self._engine.output_processor
            inner = [each for name in names for each in known.external_req_ids.get(name, ())]
            await self._engine.engine_core.abort_requests_async(inner)
            deadline = time.monotonic() + ENDING_S
            while known.request_states.keys() & inner and time.monotonic() < deadline:
                await asyncio.sleep(TOGETHER_S)
        await self._engine.abort(names)

    async def _ask(self, call: Awaitable[T]) -> T:
        """Returns the result of a vLLM call about weights or sleep. If it raises, the engine is marked lost: it may be
        half awake, or answers of its other processes may be left over and be mistaken for those of the next call."""
        try:
            return await call
        except Exception as error:
            self._life.lost = f"vLLM failed: {type(error).__name__}: {error}"
            raise

    async def _take(self, step: Awaitable[Any]) -> None:
        """Waits for a step of a weight sync. Raises RuntimeError if it failed in some process of the engine; the
        processes record failures (`workers.weights.receiver.BucketTransferEngine`)."""
        await self._ask(step)
        failures = await self._ask(self._engine.collective_rpc("weight_failure"))
        if told := "; ".join(dict.fromkeys(filter(None, failures))):
            raise RuntimeError(told)

    async def leave_weights(self) -> None:
        await self._ask(self._engine.collective_rpc("leave_weight_sync"))

    async def connect_weights(self, info: dict[str, Any]) -> None:
        """Opens the engine's end of the weight sync. info: fields of `workers.weights.receiver.BucketInitInfo`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._take(self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info)))

    async def sleep(self, level: int) -> None:
        """Releases memory until the next weight sync: the KV cache and, at level 2, the weights; level 1 moves the
        weights to the host. Raises RuntimeError if requests keep running."""
        deadline = time.monotonic() + ENDING_S
        while self._running and time.monotonic() < deadline:  # the driver does not wait for dropped groups to end
            await asyncio.sleep(TOGETHER_S)
        if self._running:
            raise RuntimeError(f"{len(self._running)} groups run on an engine that is to sleep: {[*self._running][:5]}")
        if self._asleep and not self._stirring:
            return
        if self._stirring:  # the update that woke its weights did not finish
            await self.leave_weights()
        await self._ask(self._engine.sleep(level))
        self._asleep, self._stirring = True, False

    async def start_update(self, keep: bool = False) -> None:
        """Pauses all requests until `finish_update`; they continue where they stopped. keep: with their keys and
        values, which are then stale; otherwise vLLM recomputes them. In a sleeping engine, wakes only the weights;
        requests wait for the KV cache too."""
        self._paused = True
        if self._asleep:
            self._stirring = True
            await self._ask(self._engine.wake_up(["weights"]))
        else:
            await self._ask(self._engine.pause_generation(mode="keep", clear_cache=not keep))
            self._keeps |= keep
            self._life.meter.hold(keep)
        await self._take(self._engine.start_weight_update())

    async def load_bucket(self, bucket: Bucket) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = {
            "index": bucket.index,
            "tensors": [(place.name, place.shape, place.start) for place in bucket.plan.tensors],
            "num_bytes": bucket.plan.num_bytes,
            "dtype": bucket.dtype,
            "digest": bucket.digest,
            "file": bucket.file,
        }
        await self._take(self._engine.update_weights(WeightTransferUpdateRequest(update_info=info)))

    async def finish_update(self, version: int) -> None:
        """Labels all later tokens with `version` and resumes requests; wakes the KV cache if it sleeps."""
        await self._take(self._engine.finish_weight_update())
        await self._engine.update_weight_version(str(version))
        self._version = version
        if self._asleep:
            await self._ask(self._engine.wake_up(["kv_cache"]))  # the last to wake; this also resumes requests
            self._asleep = self._stirring = False
        else:
            await self._engine.resume_generation()
        self._paused = False

    async def stop(self) -> None:
        """Ends the engine's processes. Without a timeout vLLM would give running requests seconds to finish."""
        self._engine.shutdown(timeout=0.5)


def values_of(flat: Any, sampling: Sampling) -> tuple[Float32Array, Support | None]:
    """Returns the sampled tokens' log-probabilities, [R], and their support if it was asked for. flat: vLLM's
    `FlatLogprobs`, per position those of the sampled token and then of the most likely ones."""
    logprobs, starts = np.asarray(flat.logprobs, dtype=np.float32), np.asarray(flat.start_indices, dtype=np.int64)
    if not sampling.support:
        return logprobs[starts], None
    kept = logprobs >= (LEAST_LOGPROB if sampling.truncates else NEGLIGIBLE_LOGPROB)
    kept[starts] = False
    return logprobs[starts], Support(
        counts=np.diff(np.concatenate([[0], np.cumsum(kept)])[[*starts, len(kept)]]).astype(np.uint16),
        token_ids=np.asarray(flat.token_ids, dtype=np.int32)[kept],
        logprobs=logprobs[kept] if sampling.support_logprobs else None,
    )


def end_of(token_ids: Sequence[int], stop: Sequence[str], decode: Callable[[list[int]], str]) -> int | None:
    """Returns how many of the tokens are needed to contain a whole stop string; None if there is none. decode: returns
    the text of tokens; called about log2(len(token_ids)) times."""
    holds = lambda count: any(each in decode(list(token_ids[:count])) for each in stop)  # noqa: E731
    if not stop or not holds(len(token_ids)):
        return None
    without, found = 0, len(token_ids)
    while found - without > 1:
        middle = (without + found) // 2
        without, found = (without, middle) if holds(middle) else (middle, found)
    return found


def spans_up_to(spans: Sequence[VersionSpan], end: int) -> tuple[VersionSpan, ...]:
    """Returns the spans, clipped to the first `end` tokens."""
    kept = (span for span in spans if span.start < end)
    return tuple(VersionSpan(version=span.version, start=span.start, end=min(span.end, end)) for span in kept)
