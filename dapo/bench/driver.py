"""Measures the driver's own work in one step: groups and tokens per response in, seconds per stage and peak memory out.

Synthetic responses, as engines and verifiers would hand them over, pass through the buffer, the advantages, the batch
and the metrics. The growth of peak resident memory includes the responses themselves.
"""

import argparse
import resource
import time

import numpy as np

from dapo.batch import build_batch
from dapo.config.schema import Config
from dapo.report.metrics import step_metrics
from dapo.report.table import table
from dapo.sampling.buffer import OversamplingBuffer
from dapo.types import Collected, Draw, Group, Prompt, Response, Score, TrainBatch, VersionSpan

MIXED_SHARE = 0.5
UPDATE = {"actor/response_tokens": 1.0}


def peak_bytes() -> int:
    """Returns the largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_group(index: int, rng: np.random.Generator, n: int, tokens: int) -> Group:
    """Returns a prompt of 500 tokens with n responses; half of the groups are mixed."""
    ids = np.zeros(500, dtype=np.int32)
    prompt = Prompt(id=index, source="", messages=(), text="", token_ids=ids, ground_truth="", extra_info={})
    right = rng.integers(1, n) if rng.random() < MIXED_SHARE else n * rng.integers(0, 2)
    responses = tuple(
        Response(
            token_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
            rollout_logprobs=rng.random(tokens, dtype=np.float32),
            text=" " * (4 * tokens) + str(sample),
            finish_reason="stop",
            policy_versions=(VersionSpan(version=0, start=0, end=tokens),),
            engine=0,
            seconds=0.0,
        )
        for sample in range(n)
    )
    scores = tuple(
        Score(accuracy=a, reward=2 * a - 1, parts={"math": 1.0}, metrics={}, prediction="", failure="")
        for a in (float(sample < right) for sample in range(n))
    )
    return Group(draw=Draw(index=index, prompt=prompt), responses=responses, scores=scores)


def collect(cfg: Config, tokens: int) -> tuple[OversamplingBuffer, Collected, float]:
    """Returns a full batch, and the seconds that the buffer took; making the responses is not the driver's work."""
    rng = np.random.default_rng(0)
    buffer = OversamplingBuffer.of(cfg)
    spent = 0.0
    began = time.monotonic()
    buffer.open()
    while not buffer.full:
        draws = buffer.take(64)
        spent += time.monotonic() - began
        for index in draws:
            group = make_group(index, rng, cfg.rollout.n, tokens)
            began = time.monotonic()
            buffer.generated(index, group.num_tokens)
            buffer.add(group)
            spent += time.monotonic() - began
        began = time.monotonic()
    collected = buffer.close()
    return buffer, collected, spent + time.monotonic() - began


def run(given: argparse.Namespace) -> None:
    """Prints a table with the seconds of each stage."""
    cfg = Config()
    cfg.data.train_batch_size, cfg.data.gen_batch_size = given.groups, 3 * given.groups
    before = peak_bytes()
    buffer, collected, buffer_s = collect(cfg, given.tokens)
    held = peak_bytes()
    began = time.monotonic()
    batch: TrainBatch = build_batch(collected.groups, cfg, version=0)
    batch_s = time.monotonic() - began
    began = time.monotonic()
    step_metrics(collected, batch, UPDATE, {}, buffer.metrics())
    metrics_s = time.monotonic() - began
    seconds = (buffer_s, batch_s, metrics_s, buffer_s + batch_s + metrics_s)
    gib = ((peak_bytes() - before) / 2**30, (held - before) / 2**30)
    print(
        f"{len(collected.drawn)} draws of {cfg.rollout.n} responses of {given.tokens} tokens, "
        f"{len(collected.groups)} groups trained on"
    )
    names = ("buffer s", "advantages and batch s", "metrics s", "together s", "growth of peak memory GiB")
    print(table((*names, "of which the responses GiB"), [[f"{value:.2f}" for value in (*seconds, *gib)]]))
