"""Measures updates of one rank on one device, at a model's shape with random weights.

The update is the trainer's own, from reading the weight files to the optimizer step. MFU = model FLOPs / seconds / peak
FLOPs. Model FLOPs = 3 x the forward pass, because the backward pass counts twice (`dapo.config.facts.model_shape`:
matrices 2 FLOPs per weight and token, the head at response tokens only, causal attention at half of its square).
Recomputation by activation checkpointing does not count.
"""

import argparse
import json
import multiprocessing
import resource
import socket
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dapo.config.facts.model_shape import read_shape
from dapo.config.schema import Config
from dapo.tools.bench.setting import LEARNT_NOTHING, bench_config, needs_device, random_batch, random_weights
from dapo.types import TrainBatch
from dapo.workers.actor import ActorWorker, split_batch

WARM_UP = 1
CASE_TIMEOUT_S = 900


def run_case(given: argparse.Namespace, cfg: Config, model: str, tokens: int, folder: str) -> dict[str, Any]:
    """Returns one row; if the device runs out of memory it has "error" in place of the figures. cfg: `model.path` and
    `actor.max_tokens_per_gpu` are set here. folder: for the weights, removed by the caller."""
    shape = read_shape(model)
    row: dict[str, Any] = {
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
    }
    cfg.model.path = str(random_weights(model, Path(folder)))
    cfg.actor.max_tokens_per_gpu = tokens
    length = tokens // given.sequences
    prompt, count = max(1, length // 8), given.sequences * given.micro_batches
    batch = random_batch([(prompt, length - prompt)] * count, shape.vocab_size, np.random.default_rng(0))
    try:
        seconds, metrics = _updates(cfg, given.device, batch, given.repeats)
    except torch.cuda.OutOfMemoryError as error:
        return row | {"error": f"out of memory: {error}".splitlines()[0], "peak_bytes": peak_bytes(given.device)}
    flops = 3 * shape.forward_flops([length] * count, head_tokens=count * (length - prompt))
    return row | {
        "seconds": seconds,
        "tokens_per_s": count * length / seconds,
        "model_flops": flops,
        "peak_flops": given.peak_flops,
        "mfu": flops / seconds / given.peak_flops,
        "peak_bytes": peak_bytes(given.device),
        "grad_norm": metrics["actor/grad_norm"],
    }


def _updates(cfg: Config, device: str, batch: TrainBatch, updates: int) -> tuple[float, dict[str, float]]:
    worker = ActorWorker(cfg, device)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    worker.start(0, 1, "127.0.0.1", port)
    [work] = split_batch(batch, 1, cfg.actor.max_tokens_per_gpu)
    seconds = []
    for version in range(WARM_UP + updates):
        began = time.perf_counter()
        metrics = worker.update(replace(work, version=version)).metrics  # on the host: the device has finished
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM_UP:]), metrics


def peak_bytes(device: str) -> int:
    """Returns the peak memory of the process: allocated by torch on a GPU, resident on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(given: argparse.Namespace) -> None:
    needs_device(given.device)
    dtype = "bfloat16" if given.device == "cuda" else "float32"
    fixed = [f"model.dtype={dtype}", "model.gradient_checkpointing=full", "rollout.temperature=1.0"]
    fixed.append("actor.reshard_after_forward=true")  # else 7B takes 182 GB (`dapo.plan`): gradients unsharded
    for model in given.models:
        for tokens in given.tokens:
            cfg = bench_config(*LEARNT_NOTHING, *fixed, "actor.num_workers=1", *given.overrides)
            with (
                tempfile.TemporaryDirectory(dir=given.folder) as folder,
                # One process per row: each starts with an empty device, and an error ends only its own row.
                ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process,
            ):
                try:
                    case = process.submit(run_case, given, cfg, model, tokens, folder)
                    row = case.result(timeout=CASE_TIMEOUT_S)
                except Exception as error:  # the next rows do not depend on this one
                    row = {"model": model, "tokens": tokens, "error": f"{type(error).__name__}: {error}"}
                line = json.dumps(row)
            print(line, flush=True)
            with Path(given.output).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
