"""Compares an engine with an actor rank on this machine: bits of the log-probabilities, and the first layer whose
outputs differ. Responses are made twice: together, as a run does, and each alone, where a row of the engine's layers is
one token's: the prompt's prefill, then a decode step per token. One engine and one rank run, one after the other, so
that they may have the same GPU.
"""

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import numpy as np
import ray

from dapo.algorithm.own.loading import source_of
from dapo.config.derived import device_of, halve_roles, shares_prompts
from dapo.config.schema import Config
from dapo.ground.console import hearing_warnings
from dapo.tools.doctor.subject import Finding, Subject, fault, ok
from dapo.types import Float32Array, Int32Array, Response, Sampling, TrainSequence
from dapo.workers.actor import ActorWorker
from dapo.workers.cluster import connect, leave
from dapo.workers.engines.arguments import engine_args
from dapo.workers.engines.worker import RolloutWorker, Start
from dapo.workers.layer_outputs import LayerOutputs
from dapo.workers.placement import Placement
from dapo.workers.remote import wait
from dapo.workers.rollout import canary_sequence
from dapo.workers.training.batch_split import equal_at, known_shape, split_sequences

RESPONSES, TOKENS = 4, 16
LEAP = 30.0  # of the relative difference within one layer: rounding errors grow less
Rows = dict[str, Float32Array]  # [T, width] by module, in the order in which they are computed


@dataclass(frozen=True, slots=True)
class Made:
    """What one side has computed. together: log-probabilities [R] of each response, computed at once. alone: the same,
    each computed alone; rows: of the layers then, for the tokens that predict the response."""

    together: Sequence[Float32Array]
    alone: Sequence[Float32Array]
    rows: Sequence[Rows]


class ProbedEngine(RolloutWorker):
    async def respond(self, prompt: Int32Array, sampling: Sampling, seeds: Sequence[int]) -> list[Response]:
        starts = [Start(token_ids=np.zeros(0, dtype=np.int32), seed=seed) for seed in seeds]
        found: dict[int, Response] = {}
        async for part in self.generate("parity", prompt, replace(sampling, n=len(seeds)), starts):
            found |= dict(part)
        return [found[number] for number in range(len(seeds))]

    async def record(self, prompt: Int32Array, sampling: Sampling, seed: int) -> tuple[Response, Rows]:
        await self._engine.reset_prefix_cache()  # all rows must be computed
        await self._engine.collective_rpc("record_layers")
        [response] = await self.respond(prompt, sampling, [seed])
        [found, *_] = await self._engine.collective_rpc("recorded_layers")
        rows = {name: np.frombuffer(data, np.float32).reshape(-1, width) for name, (width, data) in found.items()}
        return response, predicting(rows, canary_sequence(prompt, response))


class ProbedRank(ActorWorker):
    def compute(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]:
        cfg = self._cfg
        shape = known_shape(cfg.model.path)
        bounds = (1, cfg.actor.max_tokens_per_gpu, equal_at(shape), shares_prompts(cfg))
        [work], in_order = split_sequences(sequences, *bounds)
        return in_order([self.logprobs(work, reference=False)])

    def record(self, sequence: TrainSequence) -> tuple[Float32Array, Rows]:
        outputs = LayerOutputs(self._policy.model)
        [logprobs] = self.compute([sequence])
        return logprobs, predicting({name: rows.numpy() for name, rows in outputs.take().items()}, sequence)


def predicting(rows: Rows, sequence: TrainSequence) -> Rows:
    """Returns the rows of the tokens that predict the response."""
    first, last = sequence.num_prompt_tokens - 1, len(sequence.token_ids) - 1
    return {name: values[first:last].copy() for name, values in rows.items()}


async def sample(cfg: Config, prompt: Int32Array) -> tuple[Made, list[TrainSequence], list[TrainSequence]]:
    """Samples with one engine. Returns also the sequences sampled together, and those sampled alone."""
    cfg = half(cfg, "rollout")
    placement = Placement(cfg, device_of(cfg))
    [options] = placement.rollout()
    remote: Any = ray.remote(ProbedEngine)
    engine = remote.options(max_concurrency=16, **options).remote()
    length = min(TOKENS, cfg.data.max_response_length)
    sampling = Sampling(n=1, temperature=cfg.rollout.temperature, top_p=1.0, top_k=-1, max_tokens=length)
    ask = asker(engine, cfg.rollout.timeout_s, "the engine", "rollout.timeout_s")
    try:
        # Hooks do not run in compiled or captured graphs; a draft would add rows of tokens that are rejected.
        args = engine_args(cfg, device_of(cfg)) | {"enforce_eager": True, "speculative_config": None}
        starting = engine.start.remote(cfg.model.path, args)
        await wait([starting], cfg.rollout.start_timeout_s, "the engine", "rollout.start_timeout_s")
        together = await ask("respond", prompt, sampling, range(RESPONSES))
        alone = [await ask("record", prompt, sampling, seed) for seed in range(RESPONSES)]
        await ask("stop")
    finally:
        ray.kill(engine)
        placement.release_engine(0)
    made = Made(
        together=[response.rollout_logprobs for response in together],
        alone=[response.rollout_logprobs for response, _ in alone],
        rows=[rows for _, rows in alone],
    )
    of = lambda responses: [canary_sequence(prompt, response) for response in responses]  # noqa: E731
    return made, of(together), of(response for response, _ in alone)


async def recompute(cfg: Config, together: Sequence[TrainSequence], alone: Sequence[TrainSequence]) -> Made:
    """Computes the same sequences with one actor rank."""
    cfg = half(cfg, "train")
    [options] = Placement(cfg, device_of(cfg)).actors()
    remote: Any = ray.remote(ProbedRank)
    rank = remote.options(**options).remote(cfg, device_of(cfg), source_of(cfg, "algorithm.policy_loss"))
    ask = asker(rank, cfg.actor.timeout_s, "the actor rank", "actor.timeout_s")
    try:
        host, port = await ask("free_address")
        starting = rank.start.remote(0, 1, host, port)
        await wait([starting], cfg.actor.start_timeout_s, "the actor rank", "actor.start_timeout_s")
        values = await ask("compute", together)
        each = [await ask("record", sequence) for sequence in alone]
    finally:
        ray.kill(rank)
    return Made(together=values, alone=[logprobs for logprobs, _ in each], rows=[rows for _, rows in each])


def half(cfg: Config, only: str) -> Config:
    """Returns the configuration of one engine or one rank."""
    cfg = copy.deepcopy(cfg)
    cfg.trainer.only, cfg.trainer.nodes_timeout_s = only, 0.0
    cfg.rollout.num_engines = cfg.actor.num_workers = cfg.actor.ulysses_sequence_parallel_size = 1
    cfg.algorithm.kl.loss_coeff = cfg.algorithm.kl.reward_coeff = 0.0  # no reference policy
    cfg.actor.fsdp_size, cfg.reward.model.path, cfg.reward.judge.engine.path = -1, "", ""
    halve_roles(cfg)
    return cfg


def asker(worker: Any, timeout_s: float, what: str, key: str) -> Callable[..., Any]:
    async def ask(method: str, *args: Any) -> Any:
        return (await wait([getattr(worker, method).remote(*args)], timeout_s, what, key))[0]

    return ask


def told(engine: Made, actors: Made) -> tuple[str, float]:
    """Returns what the comparison has found, in words, and the mean difference of the log-probabilities."""
    gaps, alone = (
        np.abs(np.concatenate(own).astype(np.float64) - np.concatenate(others))
        for own, others in ((engine.together, actors.together), (engine.alone, actors.alone))
    )
    points = differences(engine, actors)
    if not (gaps.any() or alone.any() or any(points.values())):
        return f"engine and actors: equal bits in {len(gaps)} of {len(gaps)} tokens", 0.0
    found = "engine and actors: "
    if gaps.any():
        found += (
            f"log-probabilities differ in {np.count_nonzero(gaps)} of {len(gaps)} tokens, mean {gaps.mean():.1e}, "
            f"largest {gaps.max():.1e}; "
        )
    else:
        found += f"equal log-probabilities in {len(gaps)} of {len(gaps)} tokens; "
    if not any(points.values()):
        return f"{found}equal bits when each response is computed alone", float(gaps.mean())
    if len(points) == 1:
        return f"{found}none of their layers have the same names", float(gaps.mean())
    first = next(name for name, gap in points.items() if gap)
    found += f"outputs differ from {first} on, there by {points[first]:.1e} of the largest value"
    if leap := leaping(points):
        before, after, name = leap
        found += f"; from {before:.1e} to {after:.1e} in {name}"
    return found, float(gaps.mean())


def differences(engine: Made, actors: Made) -> dict[str, float]:
    """Returns the largest difference over the largest value, by place in the model, each response computed alone."""
    pairs = list(zip(engine.rows, actors.rows, strict=True))
    found: dict[str, float] = {}
    for name in actors.rows[0]:
        if all(name in own and own[name].shape == others[name].shape for own, others in pairs):
            largest = max(float(np.abs(others[name]).max()) for _, others in pairs)
            gap = max(float(np.abs(own[name] - others[name]).max()) for own, others in pairs)
            found[place(name)] = gap / largest if gap else 0.0
    logprobs = np.concatenate(actors.alone)
    gap = float(np.abs(np.concatenate(engine.alone) - logprobs).max())
    return found | {"the head": gap / float(np.abs(logprobs).max()) if gap else 0.0}


def place(name: str) -> str:
    """Returns "layer 2 (mlp)" for model.layers.2.mlp, "layer 2 (sum)" for model.layers.2, "norm" for model.norm."""
    _, kind, *rest = name.split(".")
    return f"layer {rest[0]} ({rest[1] if rest[1:] else 'sum'})" if rest else kind


def leaping(points: dict[str, float]) -> tuple[float, float, str] | None:
    """Returns the place where the difference grows most over all before it, if by more than `LEAP`; how large it is
    before and there."""
    most, found = 0.0, None
    for name, gap in points.items():
        if most and gap > max(LEAP, found[1] / found[0] if found else 0.0) * most:
            found = (most, gap, name)
        most = max(most, gap)
    return found


@contextmanager
def cluster(cfg: Config) -> Iterator[None]:
    """Ray, as it is joined already or of its own."""
    if ray.is_initialized():
        yield
        return
    connect(cfg.trainer.ray_address, worker_logs=False)
    try:
        yield
    finally:
        leave()


def look(subject: Subject) -> Finding:
    from dapo.driver.run import load_data, make_paths_absolute

    cfg = copy.deepcopy(subject.cfg)
    make_paths_absolute(cfg)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), hearing_warnings(lambda line: None):
        prompts, *_ = load_data(cfg)

    async def both() -> tuple[str, float]:
        engine, *sequences = await sample(cfg, prompts[0].token_ids)
        return told(engine, await recompute(cfg, *sequences))

    with cluster(cfg):
        found, mean = asyncio.run(both())
    bound = cfg.weight_sync.max_mean_logprob_diff
    if mean <= bound:
        return ok(found)
    return fault(
        found,
        f"the mean is above `weight_sync.max_mean_logprob_diff` ({bound:g}): a run would set such batches aside; see "
        "that both load the same files, take `model.head_dtype=float32`, or raise it",
    )
