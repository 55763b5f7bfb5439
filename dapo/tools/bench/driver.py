"""Measures the driver of fleets that this machine does not have: the real trainer, stream, buffer, engine pool, reward
pool and weight sync, against engines that only sleep for the drawn lengths and answer with random tokens.

All is in one process, and its time jumps to the next timer: the CPU seconds per second of the fleet are known even
where one core does not suffice. The engines' own work is among them, Ray's is not. With `--ray`, engines and reward
workers are Ray actors and time is real."""

import argparse
import asyncio
import gc
import itertools
import math
import selectors
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from dapo.algorithm.batch import has_signal
from dapo.config.schema import Config
from dapo.data.order import PromptOrder
from dapo.driver.fleet import ray_cluster
from dapo.driver.run import COLLECT_AT
from dapo.ground.clock import PhaseClock
from dapo.ground.console import warn
from dapo.ground.table import head, row
from dapo.pools import Pools, Updated
from dapo.sampling.buffer import OversamplingBuffer
from dapo.state.batches import stream_of
from dapo.trainer import Trainer
from dapo.types import (
    Float32Array,
    Int32Array,
    Prompt,
    Response,
    Sampling,
    Score,
    TrainBatch,
    TrainSequence,
    VersionSpan,
)
from dapo.workers.capacity import EngineSize
from dapo.workers.engines.life import Pulse
from dapo.workers.engines.load import EngineMeter
from dapo.workers.engines.slot import EngineSlot
from dapo.workers.engines.worker import TOGETHER_S, Start
from dapo.workers.reward import RewardPool
from dapo.workers.rollout import RolloutPool
from dapo.workers.scoring.verdict import Verdict
from dapo.workers.weight_sync import WeightSync
from dapo.workers.weights.bucket import Bucket, BucketPlan, Endpoint, TensorPlace

NAMES = (
    *("engines", "groups/s", "responses/s", "pulses/s", "us a response", "us a pulse", "CPU s a sync"),
    *("CPU s per s", "longest turn s", "engines of one core"),
)
SIGMA, LONGEST = 0.9, 2  # of the log of the length; the longest response, in mean lengths
PROMPT = np.arange(1, 201, dtype=np.int32)
AHEAD = 16  # versions; enough for all engines to stay full
FILLED = 0.6  # mean lengths until the first steps are over
IDLE_S = 5.0  # in which only pulses are counted
PLAN = BucketPlan(
    tuple(TensorPlace(f"model.layers.{k}.mlp.up_proj.weight", (1024, 1024), k << 20) for k in range(16)), 0
)


class Jumping(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while it works, and jumps to the next timer when there is nothing to do.
    longest: CPU seconds of its longest turn."""

    def __init__(self) -> None:
        selector = selectors.DefaultSelector()
        select, began = selector.select, time.process_time()
        self.now, self.longest = 0.0, 0.0

        def jump(timeout: float | None = None) -> list[Any]:
            nonlocal began
            self.longest = max(self.longest, time.process_time() - began)
            found = select(timeout and 0)
            if timeout and not found:
                self.now += timeout
            began = time.process_time()
            return found

        selector.select = jump  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def _now() -> float:
    return asyncio.get_running_loop().time()


class Engine:
    """Fulfils what the pool asks of a `RolloutWorker`, and computes nothing."""

    def __init__(self, given: argparse.Namespace, seed: int) -> None:
        self._given, self._full = given, 0
        self._rng = np.random.default_rng(seed)
        self._token_ids = self._rng.integers(0, 100_000, LONGEST * given.tokens).astype(np.int32)
        self._logprobs, self._text = np.full(len(self._token_ids), -1.0, np.float32), "word" * len(self._token_ids)
        self._running: dict[str, asyncio.Future[None]] = {}
        self._counts = EngineMeter().read()

    async def start(self, model_path: str, engine_args: dict[str, Any], gpus: Sequence[str] = ()) -> EngineSize:
        # The pool gives an engine one group more than fits; here that runs too.
        return EngineSize(sequences=max(1, self._given.slots - self._given.n), kv_tokens=0, window=len(self._text))

    async def pulse(self) -> Pulse:
        return Pulse(
            requests=len(self._running), silent_s=0.0, idle_s=0.0, counts=replace(self._counts, seconds=_now())
        )

    async def generate(
        self, key: str, prompt: Int32Array, sampling: Sampling, starts: Sequence[Start]
    ) -> AsyncIterator[list[tuple[int, Response]]]:
        median = self._given.tokens / math.exp(SIGMA**2 / 2)
        drawn = self._rng.lognormal(math.log(median), SIGMA, len(starts))
        lengths = np.clip(drawn, 1, len(self._token_ids)).astype(int).tolist()
        left = sorted(range(len(starts)), key=lengths.__getitem__, reverse=True)
        began = _now() - self._age(lengths[left[0]] / self._given.tokens_per_s)
        stop = self._running[key] = asyncio.get_running_loop().create_future()
        while left:
            wait_s = began + lengths[left[-1]] / self._given.tokens_per_s - _now()
            await asyncio.wait([stop], timeout=wait_s + TOGETHER_S)
            made, part = int((_now() - began) * self._given.tokens_per_s), []
            while left and (stop.done() or lengths[left[-1]] <= made):
                part.append((left[-1], self._response(min(lengths[left.pop()], made), stop.done())))
            yield part
        del self._running[key]

    def _age(self, seconds: float) -> float:
        """Returns since when a group of these seconds runs: the first ones of an engine are found under way."""
        self._full += 1
        return seconds * self._rng.random() if self._full <= self._given.slots // self._given.n else 0.0

    def _response(self, length: int, aborted: bool) -> Response:
        return Response(
            token_ids=self._token_ids[:length],
            rollout_logprobs=self._logprobs[:length],
            text="" if aborted else self._text[: 4 * length],
            finish_reason="abort" if aborted else "stop",
            policy_versions=(VersionSpan(version=0, start=0, end=length),),
            engine=-1,
            seconds=length / self._given.tokens_per_s,
        )

    async def abort(self, keys: list[str]) -> None:
        for key in keys:
            if key in self._running:
                self._running[key].set_result(None)

    async def nothing(self, *given: Any) -> None: ...

    leave_weights = connect_weights = start_update = load_bucket = finish_update = stop = nothing


class Scorer:
    """Fulfils what the pool asks of a `RewardWorker`: every other response is right, at once."""

    def __init__(self) -> None:
        self._accuracies = itertools.cycle((0.0, 1.0))

    async def start(self, *given: Any) -> dict[str, Any]:
        empty = dict.fromkeys(("digest", "granted", "programs", "asynchronous", "without_canary"), "")
        return empty | {"reads_last": None, "asks": {"": False}, "converses": {"": False}}

    async def score(self, items: Sequence[Any]) -> AsyncIterator[list[tuple[int, Verdict]]]:
        yield [(number, _verdict(next(self._accuracies))) for number in range(len(items))]

    async def check(self) -> tuple[int, int]:
        return 0, 0


def _verdict(accuracy: float) -> Verdict:
    score = Score(accuracy=accuracy, reward=accuracy, parts={}, metrics={}, prediction="", failure="")
    return Verdict(score=score, detail="", cpu_s=0.0, wall_s=0.0)


class Actors:
    """Fulfils what the trainer and the weight sync ask of an `ActorPool`, at once."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets

    def restarts(self) -> dict[str, float]:
        return {}

    async def update(self, batch: TrainBatch) -> Updated:
        return Updated(metrics={})

    async def open_weights(self, transport: str) -> tuple[int, Sequence[Endpoint]]:
        return self._buckets, [Endpoint(capacity=0)]

    async def gather_bucket(self, transport: str, index: int, what: str) -> Bucket:
        return Bucket(index=index, plan=PLAN, dtype="bfloat16", digest="")

    async def policy_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
        return []

    async def nothing(self, *given: Any) -> None: ...

    until_idle = join_weights = close_weights = nothing


Place = Callable[..., Any]  # creates a worker of a class, and returns its handle


class Here:
    """Handle of a worker in this process, with the calls of a Ray actor's."""

    def __init__(self, kind: type, *given: Any) -> None:
        self._worker = kind(*given)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._worker, name)
        streaming = SimpleNamespace(remote=lambda *given: _streamed(call(*given)))
        return SimpleNamespace(
            remote=lambda *given: asyncio.ensure_future(call(*given)), options=lambda **options: streaming
        )


async def _streamed(parts: AsyncIterator[Any]) -> AsyncIterator[Awaitable[Any]]:
    async for part in parts:
        there = asyncio.get_running_loop().create_future()
        there.set_result(part)
        yield there


def by_ray(kind: type, *given: Any) -> Any:
    return ray.remote(kind).options(num_cpus=0, max_concurrency=4096).remote(*given)  # type: ignore[attr-defined]


class Slot(EngineSlot):
    def __init__(self, number: int, cfg: Config, place: Callable[[], Any]) -> None:
        self._place = place
        super().__init__(number, {}, cfg.rollout, count=cfg.rollout.num_engines)

    def _make(self) -> None:
        self.worker = self._place()

    def drop(self) -> None:
        self.serving, self.size = False, None


class Rewards(RewardPool):
    def __init__(self, cfg: Config, place: Place) -> None:
        self._place = place
        super().__init__({}, cfg.reward, max_response_length=cfg.data.max_response_length, warn=warn)

    def _create(self, index: int) -> Any:
        return self._place(Scorer)


def to_config(engines: int, given: argparse.Namespace) -> Config:
    """A batch has one group per engine."""
    cfg = Config()
    cfg.rollout.num_engines, cfg.rollout.n = engines, given.n
    cfg.data.train_batch_size = cfg.actor.ppo_mini_batch_size = engines
    cfg.data.gen_batch_size = engines * given.slots
    cfg.data.max_response_length = LONGEST * given.tokens
    cfg.filter_groups.max_staleness, cfg.filter_groups.admission = AHEAD, "completion"
    return cfg


async def measure(engines: int, given: argparse.Namespace, place: Place) -> list[str]:
    """Returns the cells of one fleet: of a weight sync and of pulses while the engines are idle, then of steps."""
    cfg = to_config(engines, given)
    pool, rewards = RolloutPool([], cfg.rollout, warn=warn), Rewards(cfg, place)
    actors: Any = Actors(given.buckets)
    pool.keeper.slots.extend(Slot(number, cfg, partial(place, Engine, given, number)) for number in range(engines))
    await asyncio.gather(pool.start("", {}), rewards.start(cfg.rollout.start_timeout_s))
    sync = WeightSync(actors, pool, cfg)
    pools = Pools(rollouts=pool, rewards=rewards, actors=actors, sync_weights=sync, weights=sync.lock)
    buffer, clock = OversamplingBuffer.of(cfg, lambda group: has_signal(group, cfg)), PhaseClock()
    order = PromptOrder.of(cfg, [_prompt(number) for number in range(1000)])
    stream = stream_of(cfg, order, buffer, pools, clock)
    trainer = Trainer(cfg, pools, order, stream, clock)

    async with sync.lock:
        await sync(0)  # connects
        sync_s, _ = await _spent(sync(0))
    idle_s, _ = await _spent(asyncio.sleep(IDLE_S))
    pulses_per_s = engines / pool.keeper.slots[0].pulse_s
    pulse_s = idle_s / (pulses_per_s * IDLE_S)
    training = asyncio.ensure_future(_forever(trainer.step))
    await asyncio.wait([training], timeout=FILLED * given.tokens / given.tokens_per_s)
    drawn, version, loop = buffer.draws.drawn, trainer.version, asyncio.get_running_loop()
    if isinstance(loop, Jumping):
        loop.longest = 0.0
    cpu_s, seconds = await _spent(asyncio.wait([training], timeout=given.seconds))
    longest = f"{loop.longest:.2f}" if isinstance(loop, Jumping) else ""
    if training.done():
        training.result()
    training.cancel()
    cpu_s -= (trainer.version - version) * sync_s
    groups, pulses = buffer.draws.drawn - drawn, seconds * pulses_per_s
    await stream.close()
    response_s = (cpu_s - pulses * pulse_s) / (groups * given.n)
    return [
        str(engines),
        *(f"{count / seconds:.1f}" for count in (groups, groups * given.n, pulses)),
        *(f"{1e6 * one:.0f}" for one in (response_s, pulse_s)),
        f"{sync_s:.2f}",
        f"{cpu_s / seconds:.3f}",
        longest,
        f"{engines * seconds / cpu_s:.0f}",
    ]


def _prompt(number: int) -> Prompt:
    return Prompt(id=number, source="", messages=(), text="", token_ids=PROMPT, ground_truth="", extra_info={})


async def _forever(step: Callable[[], Awaitable[Any]]) -> None:
    while True:
        await step()


async def _spent(work: Awaitable[Any]) -> tuple[float, float]:
    """Returns the CPU seconds of this process, and the seconds by the event loop's clock."""
    before, began = time.process_time(), _now()
    await work
    return time.process_time() - before, _now() - began


def run(given: argparse.Namespace) -> None:
    print(
        f"{given.slots} slots an engine at {given.tokens_per_s:g} tokens/s, {given.tokens} tokens a response, "
        f"{given.n} a group, {given.seconds:g} s, {given.buckets} buckets a weight sync"
    )
    print(head(NAMES))
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AT)  # as a run does
    try:
        for engines in given.engines:
            if given.ray:
                with ray_cluster(Config()):
                    cells = asyncio.run(measure(engines, given, by_ray))
            else:
                with asyncio.Runner(loop_factory=Jumping) as runner:
                    cells = runner.run(measure(engines, given, Here))
            print(row(cells), flush=True)
    finally:
        gc.set_threshold(*before)
