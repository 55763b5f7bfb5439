"""Shared setup of the benchmarks: dapo_tiny with overrides, its prompts, Ray, workers, and a trainer."""

import argparse
import asyncio
import json
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

from dapo.config.compose import compose
from dapo.config.derived import device_of, shares_gpus
from dapo.config.facts.model_shape import read_config, read_shape
from dapo.config.schema import Config
from dapo.driver.fleet import STOP_GRACE_S, build_pools, ray_cluster
from dapo.driver.run import load_data, make_paths_absolute
from dapo.driver.session import Session
from dapo.ground.table import table
from dapo.pools import Pools
from dapo.report.log import MetricsLogger
from dapo.state.checkpoint import CheckpointStore
from dapo.tiny.random_model import make_random_model
from dapo.tiny.tokenizer import make_tokenizer
from dapo.types import Prompt, TrainBatch, TrainSequence
from dapo.workers.actor import ActorPool
from dapo.workers.engines.arguments import engine_args
from dapo.workers.placement import Placement
from dapo.workers.rollout import RolloutPool

# The learning rate is so small that each step makes the same requests, whatever was learnt.
COMMON = ("actor.optim.lr=1e-12", "eval.before_train=false", "logging.samples=0", "checkpoint.every=0", "rollout.n=8")
LEARNT_NOTHING = ("actor.optim.lr=1e-12", "weight_sync.max_mean_logprob_diff=1e9")  # tokens are drawn at random
VOCABULARY = 100  # tokens that are drawn from, as few as the tiny models have
INIT_STD = 0.02
POOL = 1 << 24  # random numbers that all weights are cut from
TIMEOUT_S = 60.0  # of a question to a worker
LONG = (
    "data.max_response_length=2048",
    "actor.max_tokens_per_gpu=4096",
    "reward.overlong_buffer.enable=false",
    "reward.functions=[{path: dapo.tiny.even_length}]",
)

UNFILTERED = (  # every group is trained on, as TRL does
    *("filter_groups.enable=false", "data.train_files=[pkg://dapo.smollm2/data/train.parquet]", "data.val_files=[]"),
    *("data.max_prompt_length=512", "weight_sync.max_mean_logprob_diff=1e9"),
)


def bench_config(*overrides: str) -> Config:
    """Returns the tiny experiment, or the one that `overrides` name, with the overrides applied and absolute paths."""
    named = any(override.lstrip("+").startswith("experiment=") for override in overrides)
    cfg = compose(overrides, experiment=None if named else "dapo_tiny")
    make_paths_absolute(cfg)
    return cfg


def one_device_config(given: argparse.Namespace, path: str, *overrides: str) -> Config:
    """Returns the configuration of one rank and one engine that take turns on `--device`."""
    return bench_config(
        *(f"model.path={path}", f"model.dtype={'bfloat16' if given.device == 'cuda' else 'float32'}"),
        *(f"trainer.device={given.device}", "trainer.colocate=time", "actor.num_workers=1", "rollout.temperature=1.0"),
        *overrides,
        *given.overrides,
    )


def run_config(lengths: str, folder: Path, overrides: Sequence[str], model: str = "") -> Config:
    """Returns a configuration with 8 responses per prompt; "long" uses a random model whose responses end at random, or
    one of the shape of `model`."""
    arguments = [*COMMON, f"trainer.output_dir={folder / lengths}"]
    if lengths == "long":
        path = random_model(model, folder / "random") if model else make_random_model(folder / "random")
        arguments += [*LONG, f"model.path={path}"]
    if model:
        arguments += UNFILTERED
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
async def engines_and_actors(cfg: Config) -> AsyncIterator[tuple[RolloutPool, ActorPool]]:
    """Starts both; where they share GPUs the engines are left asleep."""
    device = device_of(cfg)
    placement = Placement(cfg, device)
    engines, actors = RolloutPool(placement.rollout(), cfg.rollout), ActorPool(cfg, device, placement.actors)
    try:
        if shares_gpus(cfg):  # an engine measures free memory, so the actors load while it sleeps
            await actors.find()
            gpus = lambda number: actors.gpus(placement.ranks_of_engine(number))  # noqa: E731
            await engines.start(cfg.model.path, engine_args(cfg, device), gpus)
            await engines.sleep()
        else:
            await engines.start(cfg.model.path, engine_args(cfg, device))
        await actors.start()
        yield engines, actors
    finally:
        actors.close()
        await engines.stop(STOP_GRACE_S)


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


def needs_device(device: str) -> None:
    """Raises ValueError if this machine does not have the device of `--device`."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`--device` (cuda) is not there: torch sees no CUDA device; run this on a machine with a GPU")


def random_weights(model: str, folder: Path) -> Path:
    """Writes config.json and bfloat16 safetensors of a model of this shape; returns the folder. Matrices are normal
    with standard deviation 0.02, norms 1, biases 0."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(read_config(model)), encoding="utf-8")
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0)).mul_(INIT_STD).to(torch.bfloat16)
    tensors = {}
    for offset, (name, parameter) in enumerate(empty.named_parameters()):
        if parameter.dim() == 1:
            tensors[name] = torch.full(parameter.shape, float(name.endswith("norm.weight")), dtype=torch.bfloat16)
        else:  # each from another place in the pool, so that no two matrices are equal
            drawn = pool.roll(offset).repeat(-(-parameter.numel() // POOL))[: parameter.numel()]
            tensors[name] = drawn.reshape(parameter.shape).clone()
    save_torch_state_dict(tensors, folder)
    return folder


def random_model(model: str, folder: Path) -> Path:
    """Writes `random_weights` and a tokenizer of that vocabulary; returns the folder."""
    path = random_weights(model, folder)
    make_tokenizer(read_shape(model).vocab_size).save_pretrained(path)
    return path


def of_models(
    given: argparse.Namespace,
    to_config: Callable[[argparse.Namespace, str], Config],
    measure: Callable[[Config, str], Coroutine[Any, Any, list[list[str]]]],
    names: Sequence[str],
    title: str,
) -> None:
    """Measures each of `--models` with random weights, and prints the rows under a title."""
    needs_device(given.device)
    rows: list[list[str]] = []
    try:
        for model in given.models:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                path = random_model(model, Path(folder) / "model")
                rows += asyncio.run(measure(to_config(given, str(path)), model))
    finally:  # print the finished rows even if a larger model fails
        print(title)
        print(table(names, rows))


class Recording:
    """Wraps a pool and forwards every attribute that the subclass does not override."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)
