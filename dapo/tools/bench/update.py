"""Measures updates by FSDP ranks on CPU against a loop written by hand in plain torch and transformers, on the same
packed micro-batches. The baselines use no FSDP, gradient exchange, metrics or guards: each process has its own copy of
the model."""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from dapo.config.derived import shares_prompts
from dapo.config.schema import Config
from dapo.ground.table import table
from dapo.tiny.random_model import make_random_model
from dapo.tools.bench.setting import LEARNT_NOTHING, VOCABULARY, bench_config, cluster, random_batch
from dapo.types import TrainBatch, TrainSequence
from workers.actor import ActorPool, ActorWorker, RankWork, split_batch
from workers.placement import Placement
from workers.remote import wait
from workers.training.forward.attention import implementation
from workers.training.forward.policy import MicroBatch, PackedPolicy, collate

WANTED_THROUGHPUT = 0.85  # of the loop written by hand
WARM_UP = 2  # rounds: the first ones fill allocators and caches
SIZES = {
    "short": (),  # 16 groups of 16
    "long": ("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.n=8", "data.max_response_length=2048"),
}


def load_model(cfg: Config) -> PreTrainedModel:
    torch.set_num_threads(cfg.actor.cpu_threads)
    kind = implementation(cfg.model.attn_implementation)
    return AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32, attn_implementation=kind)


class BareRank:
    """Forward and backward through the trainer's own log-probabilities."""

    def __init__(self, cfg: Config) -> None:
        self._shared = shares_prompts(cfg)
        self._policy = PackedPolicy(load_model(cfg), cfg.rollout.temperature).train()

    def run(self, work: RankWork) -> float:
        began = time.perf_counter()
        for k in work.order:
            for sequences in work.minibatches[k]:
                batch = collate(sequences, torch.device("cpu"), share_prompts=self._shared)
                logprobs, _ = self._policy(batch)
                (-batch.weights * batch.advantages * logprobs).sum().backward()
        self._policy.zero_grad()
        return time.perf_counter() - began


class HandWrittenRank:
    """A whole update as one would write it for one process: full logits, plain autograd, no shared prompts."""

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self._model = load_model(cfg)
        optim = cfg.actor.optim
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )

    def run(self, work: RankWork) -> float:
        began = time.perf_counter()
        for k in work.order:
            self._step(work.minibatches[k])
        return time.perf_counter() - began

    def _step(self, micro_batches: Sequence[Sequence[TrainSequence]]) -> None:
        for sequences in micro_batches:
            batch = collate(sequences, torch.device("cpu"), share_prompts=False)
            logprobs = self._logprobs(batch)
            ratio = torch.exp(logprobs - logprobs.detach())
            bounds = 1 - self._cfg.algorithm.clip_ratio_low, 1 + self._cfg.algorithm.clip_ratio_high
            gain = torch.minimum(ratio * batch.advantages, ratio.clamp(*bounds) * batch.advantages)
            (-batch.weights * gain).sum().backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._cfg.actor.optim.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        hidden = self._model.model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            use_cache=False,
            segments=batch.segments,
        ).last_hidden_state[0, batch.predictors]
        logits = self._model.lm_head(hidden).float() / self._cfg.rollout.temperature
        return logits.log_softmax(-1).gather(1, batch.labels[:, None])[:, 0]


def seconds_of(worker: ActorWorker, work: RankWork) -> float:
    """Runs on an actor rank: returns the seconds of one update within its process, at its current version."""
    work = replace(work, version=worker._version.version)
    began = time.perf_counter()
    worker.update(work)
    return time.perf_counter() - began


def response_lengths(shape: str, cfg: Config, rng: np.random.Generator) -> list[int]:
    """Returns tokens per response. short: 20 to 60, as a worked sum. long: geometric, mean 110, up to the limit."""
    count = cfg.data.train_batch_size * cfg.rollout.n
    drawn = rng.integers(20, 61, count) if shape == "short" else rng.geometric(1 / 110, count)
    return [min(int(length), cfg.data.max_response_length) for length in drawn]


def batch_of(shape: str, cfg: Config, prompt: int = 0) -> TrainBatch:
    """Returns one update of one optimizer step on random tokens. prompt: tokens of each group's prompt; 0: 10 to 20."""
    rng = np.random.default_rng(0)
    responses, n = response_lengths(shape, cfg, rng), cfg.rollout.n
    prompts = [prompt or int(rng.integers(10, 21)) for _ in range(cfg.data.train_batch_size)]
    batch = random_batch([(prompts[i // n], response) for i, response in enumerate(responses)], VOCABULARY, rng)
    for i, sequence in enumerate(batch.minibatches[0]):
        first = batch.minibatches[0][i - i % n]
        sequence.token_ids[: first.num_prompt_tokens] = first.token_ids[: first.num_prompt_tokens]
    return batch


async def bench_update(batch: TrainBatch, cfg: Config, repeats: int) -> list[tuple[float, float, float]]:
    """Returns three times in seconds per round, without the `WARM_UP` rounds. They are: the update as the trainer waits
    for it, with Ray; the slowest rank within its process; the slowest process of the hand-written loop."""
    remote: Any = ray.remote(HandWrittenRank)
    rounds = []
    with cluster(cfg):
        options = Placement(cfg, "cpu").actors()
        loop = [remote.options(**option).remote(cfg) for option in options]
        pool = ActorPool(cfg, "cpu", lambda: options)
        await pool.start()
        works = split_batch(batch, *pool._bounds)

        async def slowest(refs: Sequence[Any]) -> float:
            return max(await wait(refs, cfg.actor.timeout_s, "a round", "actor.timeout_s"))

        for turn in range(WARM_UP + repeats):
            began = time.perf_counter()
            await pool.update(replace(batch, version=2 * turn))  # and another update within its processes
            waited = time.perf_counter() - began
            ranks = zip(pool._ranks.workers, works, strict=True)
            within = await slowest([rank.__ray_call__.remote(seconds_of, work) for rank, work in ranks])
            by_hand = await slowest([rank.run.remote(work) for rank, work in zip(loop, works, strict=True)])
            rounds.append((waited, within, by_hand))
        pool.close()
    return rounds[WARM_UP:]


def run(given: argparse.Namespace) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        random_model = make_random_model(Path(folder) / "random")  # its positions suffice for the long shape
        for shape in given.shapes:
            model = [f"model.path={random_model}"] if shape == "long" else []
            cfg = bench_config(*LEARNT_NOTHING, *SIZES[shape], *model, *given.overrides)
            batch = batch_of(shape, cfg, given.prompt)
            rounds = asyncio.run(bench_update(batch, cfg, given.repeats))
            tokens = sum(len(sequence.token_ids) for sequence in batch.minibatches[0])
            speeds = [f"{tokens / statistics.median(column):.0f}" for column in zip(*rounds, strict=True)]
            within, waited = ([loop / one[k] for *one, loop in rounds] for k in (1, 0))
            rows.append([shape, f"{tokens}", *speeds, *spread(within), *spread(waited)])
    of_speeds = ("update tokens/s with Ray", "within ranks", "loop")
    print(table(["shape", "tokens", *of_speeds, "within ranks / loop", "range", "with Ray / loop", "range"], rows))
    print(f"wanted: at least {WANTED_THROUGHPUT} of the loop, which exchanges no gradients, in as many processes")


def spread(ratios: Sequence[float]) -> list[str]:
    return [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}"]
