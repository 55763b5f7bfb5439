"""Benchmark of the driver's own work: `python -m dapo.bench.driver [groups] [tokens]`, by default 512 groups of 16
responses of 5,000 tokens.

Synthetic responses, as engines and verifiers would hand them over, pass through the buffer, the advantages, the batch
and the metrics of one step. Prints seconds per stage and the growth of peak resident memory, the responses included.
"""

import resource
import sys
import time

import numpy as np

from dapo.batch import build_batch
from dapo.config.schema import Config
from dapo.report.metrics import step_metrics
from dapo.sampling.buffer import OversamplingBuffer
from dapo.types import Collected, Draw, Group, Prompt, Response, Score, TrainBatch, VersionSpan

MIXED_SHARE = 0.5
UPDATE = {"actor/response_tokens": 1.0}


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_group(index: int, rng: np.random.Generator, n: int, tokens: int) -> Group:
    """A prompt of 500 tokens and n responses; half of the groups mixed."""
    prompt = Prompt(
        id=index,
        source="synthetic",
        messages=(),
        text="",
        token_ids=np.zeros(500, dtype=np.int32),
        ground_truth="",
        extra_info={},
    )
    right = rng.integers(1, n) if rng.random() < MIXED_SHARE else n * rng.integers(0, 2)
    responses = tuple(
        Response(
            token_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
            rollout_logprobs=rng.random(tokens, dtype=np.float32),
            text=" " * (4 * tokens) + str(sample),
            finish_reason="stop",
            policy_versions=(VersionSpan(version=0, start=0, end=tokens),),
        )
        for sample in range(n)
    )
    scores = tuple(
        Score(
            accuracy=float(s < right),
            reward=2.0 * (s < right) - 1,
            parts={"math": 1.0},
            metrics={},
            prediction="",
            failure="",
        )
        for s in range(n)
    )
    return Group(draw=Draw(index=index, prompt=prompt), responses=responses, scores=scores)


def collect(cfg: Config, tokens: int) -> tuple[OversamplingBuffer, Collected, float]:
    """A full batch, and the seconds that the buffer took; making the responses is not the driver's work."""
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


def main() -> None:
    """Prints one line per stage."""
    groups, tokens = [*map(int, sys.argv[1:]), *(512, 5000)[len(sys.argv) - 1 :]][:2]
    cfg = Config()
    cfg.data.train_batch_size, cfg.data.gen_batch_size = groups, 3 * groups
    before = peak_bytes()
    buffer, collected, buffer_s = collect(cfg, tokens)
    held = peak_bytes()
    began = time.monotonic()
    batch: TrainBatch = build_batch(collected.groups, cfg, version=0)
    batch_s = time.monotonic() - began
    began = time.monotonic()
    step_metrics(collected, batch, UPDATE, {}, buffer.metrics())
    metrics_s = time.monotonic() - began
    drawn, trained = len(collected.drawn), len(collected.groups)
    print(
        f"{drawn} draws of {cfg.rollout.n} responses of {tokens} tokens, {trained} groups trained on\n"
        f"buffer {buffer_s:.2f} s · advantages and batch {batch_s:.2f} s · metrics {metrics_s:.2f} s · "
        f"together {buffer_s + batch_s + metrics_s:.2f} s\n"
        f"growth of peak resident memory {(peak_bytes() - before) / 2**30:.2f} GiB, of which the responses "
        f"{(held - before) / 2**30:.2f} GiB"
    )


if __name__ == "__main__":
    main()
