"""Benchmark of the actors: `python -m dapo.bench.actor update|logprobs|device [options] [key=value ...]`.

update: whole updates by two FSDP ranks on CPU against a loop written by hand (`dapo.bench.hand_loop`), same tokens, in
turn. logprobs: log-probabilities and entropy in chunks against whole logits (`dapo.bench.whole_logits`). device: tokens
per second, MFU and peak memory of updates on one GPU at the shapes of real models (`dapo.bench.device`), as JSON
lines.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray

from dapo.config.compose import compose
from dapo.config.schema import Config
from dapo.run import make_paths_absolute, ray_cluster
from dapo.tiny.random_model import make_random_model
from dapo.types import TrainBatch, TrainSequence
from workers.actor import ActorPool, split_batch
from workers.cluster import Placement
from workers.remote import wait

WANTED_THROUGHPUT = 0.85  # of the loop written by hand
WARM_UP = 2  # rounds: the first ones fill allocators and caches
WANTED_SECONDS = 1.3  # of whole logits
H200_PEAK_FLOPS = 989e12  # bfloat16, dense; its data sheet
MODELS = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B")
CASE_TIMEOUT_S = 900
LEARNT_NOTHING = ("actor.optim.lr=1e-12", "weight_sync.max_mean_logprob_diff=1e9")  # tokens are drawn at random
SHAPES = {
    "short": (),  # 16 groups of 16
    "long": (
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=8",
        "rollout.n=8",
        "data.max_response_length=2048",
    ),
}


def config_of(*overrides: str) -> Config:
    """The tiny experiment with `overrides`, its paths absolute."""
    cfg = compose(overrides, experiment="dapo_tiny")
    make_paths_absolute(cfg)
    return cfg


def response_lengths(shape: str, cfg: Config, rng: np.random.Generator) -> list[int]:
    """short: a worked sum, 20 to 60 tokens. long: geometric, mean 110, cut at `data.max_response_length`."""
    count = cfg.data.train_batch_size * cfg.rollout.n
    drawn = rng.integers(20, 61, count) if shape == "short" else rng.geometric(1 / 110, count)
    return [min(int(length), cfg.data.max_response_length) for length in drawn]


def random_batch(shape: str, cfg: Config, vocabulary: int = 100) -> TrainBatch:
    """One update of one optimizer step on random tokens, prompts of 10 to 20."""
    rng = np.random.default_rng(0)
    lengths = response_lengths(shape, cfg, rng)
    sequences = []
    for length in lengths:
        prompt = int(rng.integers(10, 21))
        sequences.append(
            TrainSequence(
                token_ids=rng.integers(0, vocabulary, prompt + length).astype(np.int32),
                num_prompt_tokens=prompt,
                rollout_logprobs=np.full(length, -np.log(vocabulary), np.float32),
                advantage=float(rng.choice([-1.0, 1.0])),
                token_weight=1 / sum(lengths),
                staleness=np.zeros(length, np.int32),
            )
        )
    return TrainBatch(version=0, minibatches=(tuple(sequences),), order=(0,))


async def bench_update(shape: str, cfg: Config, repeats: int) -> list[tuple[float, float, float]]:
    """Seconds of one update in turn: as the trainer waits for it, Ray included; of the slowest rank, within its
    process; and of the slowest process of the loop, likewise. `WARM_UP` rounds before do not count."""
    from dapo.bench.hand_loop import HandWrittenRank, seconds_of

    batch = random_batch(shape, cfg)
    remote: Any = ray.remote(HandWrittenRank)
    rounds = []
    with ray_cluster(cfg):
        options = Placement(cfg, "cpu").actors()
        loop = [remote.options(**option).remote(cfg) for option in options]
        pool = ActorPool(cfg, "cpu", options)
        await pool.start()
        works = split_batch(batch, *pool._bounds)

        async def slowest(refs: Sequence[Any]) -> float:
            return max(await wait(refs, cfg.actor.timeout_s, "a round", "actor.timeout_s"))

        for _ in range(WARM_UP + repeats):
            began = time.perf_counter()
            await pool.update(batch)
            waited = time.perf_counter() - began
            ranks = zip(pool._workers, works, strict=True)
            within = await slowest([rank.__ray_call__.remote(seconds_of, work) for rank, work in ranks])
            by_hand = await slowest([rank.run.remote(work) for rank, work in zip(loop, works, strict=True)])
            rounds.append((waited, within, by_hand))
        pool.close()
    return rounds[WARM_UP:]


def update(given: argparse.Namespace) -> None:
    """A Markdown table with a row per shape."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        random_model = make_random_model(Path(folder) / "random")  # its positions suffice for the long shape
        for shape in given.shapes:
            model = [f"model.path={random_model}"] if shape == "long" else []
            cfg = config_of(*LEARNT_NOTHING, *SHAPES[shape], *model, *given.overrides)
            rounds = asyncio.run(bench_update(shape, cfg, given.repeats))
            tokens = sum(len(sequence.token_ids) for sequence in random_batch(shape, cfg).minibatches[0])
            rows.append(
                [
                    *(shape, f"{tokens}"),
                    *(f"{tokens / statistics.median(column):.0f}" for column in zip(*rounds, strict=True)),
                    *spread([loop / within for _, within, loop in rounds]),
                    *spread([loop / waited for waited, _, loop in rounds]),
                ]
            )
    speeds = ("update tokens/s with Ray", "within ranks", "loop")
    print(table(["shape", "tokens", *speeds, "within ranks / loop", "range", "with Ray / loop", "range"], rows))
    print(f"wanted: at least {WANTED_THROUGHPUT} of the loop, which exchanges no gradients, in as many processes")


def logprobs(given: argparse.Namespace) -> None:
    """A Markdown table with a row per hidden size, with and without the entropy's gradient."""
    from dapo.bench.whole_logits import compare

    rows = []
    for size in given.hidden:
        for entropy_gradient in (False, True):
            pairs = compare(
                given.tokens, given.vocabulary, size, entropy_gradient=entropy_gradient, repeats=given.repeats
            )
            chunked, whole = (statistics.median(column) for column in zip(*pairs, strict=True))
            rows.append(
                [
                    f"{size}",
                    "yes" if entropy_gradient else "no",
                    f"{chunked:.2f}",
                    f"{whole:.2f}",
                    *spread([chunked / whole for chunked, whole in pairs]),
                ]
            )
    print(f"{given.tokens} tokens, vocabulary {given.vocabulary}, forward and backward, CPU seconds of one thread")
    print(table(["hidden size", "entropy gradient", "chunks s", "whole s", "chunks / whole", "range"], rows))
    print(f"wanted: at most {WANTED_SECONDS}")


def device(given: argparse.Namespace) -> None:
    """A JSON line per shape and length, printed and appended to `--output`."""
    from dapo.bench.device import Case, run_case

    dtype = "bfloat16" if given.device == "cuda" else "float32"
    fixed = [f"model.dtype={dtype}", "model.gradient_checkpointing=full", "rollout.temperature=1.0"]
    fixed.append("actor.reshard_after_forward=true")  # else 7B takes 182 GB (`dapo.plan`): all gradients whole
    for model in given.models:
        for tokens in given.tokens:
            cfg = config_of(*LEARNT_NOTHING, *fixed, "actor.num_workers=1", *given.overrides)
            with (
                tempfile.TemporaryDirectory(dir=given.folder) as folder,
                # A process for each: the next one finds the device empty, and an error ends one row only.
                ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process,
            ):
                case = Case(
                    model=model,
                    tokens=tokens,
                    sequences=given.sequences,
                    micro_batches=given.micro_batches,
                    updates=given.repeats,
                    device=given.device,
                    peak_flops=given.peak_flops,
                    folder=folder,
                    cfg=cfg,
                )
                try:
                    row = process.submit(run_case, case).result(timeout=CASE_TIMEOUT_S)
                except Exception as error:  # the next rows do not depend on this one
                    row = {"model": model, "tokens": tokens, "error": f"{type(error).__name__}: {error}"}
                line = json.dumps(row)
            print(line, flush=True)
            with Path(given.output).open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def spread(ratios: Sequence[float]) -> list[str]:
    """Median of the pairs' ratios, and smallest to largest."""
    return [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}"]


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (names, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(names), *lines[1:]])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; key=value overrides of the configuration may stand anywhere."""
    parser = argparse.ArgumentParser(prog="python -m dapo.bench.actor", description="Throughput of the actors.")
    parts = parser.add_subparsers(required=True)

    def part(name: str, run: Callable[[argparse.Namespace], None], repeats: int) -> argparse.ArgumentParser:
        added = parts.add_parser(name, help=(run.__doc__ or "").strip())
        added.set_defaults(run=run)
        added.add_argument("--repeats", type=int, default=repeats, help="measured rounds")
        return added

    of_update = part("update", update, 10)
    of_update.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    of_logprobs = part("logprobs", logprobs, 5)
    of_logprobs.add_argument("--tokens", type=int, default=1024)
    of_logprobs.add_argument("--vocabulary", type=int, default=151_936)
    of_logprobs.add_argument("--hidden", type=int, nargs="+", default=[64])
    of_device = part("device", device, 3)
    of_device.add_argument("--models", nargs="+", default=list(MODELS), help="names in config/models, or directories")
    of_device.add_argument("--tokens", type=int, nargs="+", default=[4096, 20_480], help="of one micro-batch")
    of_device.add_argument("--sequences", type=int, default=1, help="equal sequences in a micro-batch")
    of_device.add_argument("--micro-batches", type=int, default=4, help="of one update")
    of_device.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    of_device.add_argument("--peak-flops", type=float, default=H200_PEAK_FLOPS, help="of the device, per second")
    of_device.add_argument("--folder", help="where the random weights go for a while (7B: 15 GB)")
    of_device.add_argument("--output", default="bench_actor.jsonl")
    given, rest = parser.parse_known_args(arguments)
    if unknown := [word for word in rest if "=" not in word or word.startswith("-")]:
        parser.error(f"unknown: {' '.join(unknown)}; overrides are written key=value")
    given.overrides = rest
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one part and prints its figures."""
    given = parse(arguments)
    given.run(given)


if __name__ == "__main__":
    main()
