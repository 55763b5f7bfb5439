"""Shared setup of the benchmarks: dapo_tiny with overrides, its prompts, Ray, workers, and a trainer."""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path

import numpy as np
import ray

from dapo.config.compose import compose
from dapo.config.schema import Config
from dapo.derived import device_of
from dapo.driver.session import Session
from dapo.fleet import STOP_GRACE_S, build_pools, ray_cluster
from dapo.pools import Pools
from dapo.report.log import MetricsLogger
from dapo.run import load_data, make_paths_absolute
from dapo.state.checkpoint import CheckpointStore
from dapo.tiny.random_model import make_random_model
from dapo.types import Prompt, TrainBatch, TrainSequence
from workers.engines.arguments import engine_args
from workers.placement import Placement
from workers.rollout import RolloutPool

# The learning rate is so small that each step makes the same requests, whatever was learnt.
COMMON = ("actor.optim.lr=1e-12", "eval.before_train=false", "logging.samples=0", "checkpoint.every=0", "rollout.n=8")
LONG = (
    "data.max_response_length=2048",
    "actor.max_tokens_per_gpu=4096",
    "reward.overlong_buffer.enable=false",
    "reward.functions=[{path: dapo.tiny.even_length}]",
)


def bench_config(*overrides: str) -> Config:
    """Returns the tiny experiment, or the one that `overrides` name, with the overrides applied and absolute paths."""
    named = any(override.startswith("+experiment=") for override in overrides)
    cfg = compose(overrides, experiment=None if named else "dapo_tiny")
    make_paths_absolute(cfg)
    return cfg


def run_config(lengths: str, folder: Path, overrides: Sequence[str]) -> Config:
    """Returns a configuration with 8 responses per prompt; "long" uses a random model whose responses end at random."""
    arguments = [*COMMON, f"trainer.output_dir={folder / lengths}"]
    if lengths == "long":
        arguments += [*LONG, f"model.path={make_random_model(folder / 'random')}"]
    (folder / lengths).mkdir()
    return bench_config(*arguments, *overrides)


def cluster(cfg: Config) -> AbstractContextManager[None]:
    """Starts Ray as a run does; if this process is already connected, uses that cluster and leaves it up."""
    return nullcontext() if ray.is_initialized() else ray_cluster(cfg)


@asynccontextmanager
async def workers(cfg: Config) -> AsyncIterator[tuple[Pools, list[Prompt]]]:
    prompts, _, _ = load_data(cfg)
    with cluster(cfg):
        async with build_pools(cfg) as pools:
            yield pools, prompts


@asynccontextmanager
async def engine(cfg: Config) -> AsyncIterator[RolloutPool]:
    device = device_of(cfg)
    pool = RolloutPool(Placement(cfg, device).rollout(), cfg.rollout)
    try:
        await pool.start(cfg.model.path, engine_args(cfg, device))
        yield pool
    finally:
        await pool.stop(STOP_GRACE_S)


@asynccontextmanager
async def trainer(
    cfg: Config,
    pools: Pools,
    prompts: Sequence[Prompt],
    directory: Path,
) -> AsyncIterator[Session]:
    """Yields a session that writes to `directory`, which is created; on exit nothing generates any more."""
    directory.mkdir()
    logger = MetricsLogger(directory)
    store = CheckpointStore(directory / "checkpoints", keep=1)
    training = Session(cfg, pools, prompts, [], store, logger, say=lambda line: None)
    try:
        yield training
    finally:
        await training.stream.close()
        training.saver.close()
        logger.close()


def random_batch(lengths: Sequence[tuple[int, int]], vocabulary: int, rng: np.random.Generator) -> TrainBatch:
    """Returns one optimizer step on random tokens, with the log-probabilities of a uniform distribution. lengths:
    prompt and response tokens of each sequence."""
    total = sum(response for _, response in lengths)
    sequences = tuple(
        TrainSequence(
            token_ids=rng.integers(0, vocabulary, prompt + response).astype(np.int32),
            num_prompt_tokens=prompt,
            rollout_logprobs=np.full(response, -math.log(vocabulary), np.float32),
            advantage=float(rng.choice([-1.0, 1.0])),
            token_weight=1 / total,
            staleness=np.zeros(response, np.int32),
        )
        for prompt, response in lengths
    )
    return TrainBatch(version=0, minibatches=(sequences,), order=(0,))
