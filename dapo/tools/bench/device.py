"""Measures updates of one rank on one device, at a model's shape with random weights.

The update is the trainer's own, from reading the weight files to the optimizer step. MFU = model FLOPs / seconds / peak
FLOPs. Model FLOPs = 3 x the forward pass, because the backward pass counts twice (`dapo.config.facts.model_shape`:
matrices 2 FLOPs per weight and token, the head at response tokens only, causal attention at half of its square).
Recomputation by activation checkpointing does not count.
"""

import argparse
import itertools
import json
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dapo.config.facts.model_shape import read_shape
from dapo.tools.bench.alone import Row, Send, alone
from dapo.tools.bench.setting import (
    LEARNT_NOTHING,
    bench_config,
    needs_device,
    random_batch,
    random_weights,
)
from dapo.workers.actor import ActorWorker, split_batch

WARM_UP = 1
TIMEOUT_S = 1800


def updates(send: Send, path: str, given: argparse.Namespace, model: str, overrides: Sequence[str] = ()) -> None:
    """Sends a row for each of `--tokens`, of ranks that start once. path: of weights of the model's shape. Needs a
    process of its own."""
    cfg = bench_config(*arguments(given.device, path, given.tokens), *overrides, *given.overrides)
    shape, worker = read_shape(model), ActorWorker(cfg, given.device)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    worker.start(0, 1, "127.0.0.1", port)
    versions = itertools.count()
    for tokens in given.tokens:
        length, count = tokens // given.sequences, given.sequences * given.micro_batches
        prompt = max(1, length // 8)
        batch = random_batch([(prompt, length - prompt)] * count, shape.vocab_size, np.random.default_rng(0))
        [work] = split_batch(batch, 1, tokens)
        seconds = []
        for _ in range(WARM_UP + given.repeats):
            began = time.perf_counter()
            metrics = worker.update(replace(work, version=next(versions))).metrics  # on the host: it has finished
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds[WARM_UP:])
        flops = 3 * shape.forward_flops([length] * count, head_tokens=count * (length - prompt))
        send(
            {
                "model": model,
                "parameters": shape.parameters,
                "tokens": tokens,
                "sequences": given.sequences,
                "micro_batches": given.micro_batches,
                "gradient_checkpointing": cfg.model.gradient_checkpointing,
                "dtype": cfg.model.dtype,
                "attn_implementation": cfg.model.attn_implementation,
                "offload": cfg.actor.offload,
                "device": torch.cuda.get_device_name() if given.device == "cuda" else given.device,
                "torch": torch.__version__,
                "seconds": median,
                "tokens_per_s": count * length / median,
                "model_flops": flops,
                "peak_flops": given.peak_flops,
                "mfu": flops / median / given.peak_flops,
                "peak_bytes": peak_bytes(given.device),
                "grad_norm": metrics["actor/grad_norm"],
            }
        )


def arguments(device: str, path: str, tokens: Sequence[int]) -> list[str]:
    """Returns the overrides for one rank."""
    return [
        *LEARNT_NOTHING,
        *(f"model.path={path}", f"model.dtype={'bfloat16' if device == 'cuda' else 'float32'}"),
        *("model.gradient_checkpointing=full", "rollout.temperature=1.0", "actor.num_workers=1"),
        "actor.reshard_after_forward=true",  # else 7B takes 182 GB (`dapo.plan`): gradients unsharded
        f"actor.max_tokens_per_gpu={max(tokens)}",
    ]


def peak_bytes(device: str) -> int:
    """Returns the peak memory of the process: allocated by torch on a GPU, resident on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(given: argparse.Namespace) -> None:
    needs_device(given.device)
    for model in given.models:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            path = str(random_weights(model, Path(folder)))
            try:
                for row in alone(updates, path, given, model, timeout_s=TIMEOUT_S):
                    write(given.output, row)
            except RuntimeError as error:  # the next models do not depend on this one
                write(given.output, {"model": model, "error": str(error)})


def write(path: str, row: Row) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
