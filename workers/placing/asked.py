"""Computes the resources that each role requests, from the configuration and the device: one `Pool` per role."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dapo.config.derived import gpus_per_engine, lends, ranks_of_a_piece, shares_gpus
from dapo.config.schema import Config

RANKS, ENGINES, REWARD_MODEL, JUDGES = "actor ranks", "engines", "reward model", "judges"
# Makes Ray show a process only its own GPUs, whatever this variable is set to on its node.
OWN_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}


@dataclass(frozen=True, slots=True)
class Pool:
    """Resources of one role: `count` pieces of `gpus` and `cpus`, each on one node. about: the role, with the keys that
    determine its size. piece: what must be on one node, with its key. count_key, per_piece: the key to lower if fewer
    pieces fit, and how much of it one piece is. labels: required node labels, from the key `labels_key`."""

    name: str
    about: str
    piece: str
    count: int
    gpus: int
    cpus: int
    count_key: str
    per_piece: int
    labels: Mapping[str, str]
    labels_key: str

    @property
    def all_gpus(self) -> int:
        return self.count * self.gpus


def reward_model_device(cfg: Config, device: str) -> str:
    """Returns where the reward model runs, `cpu` or `cuda`. device: the trainer's."""
    return device if cfg.reward.model.device == "auto" else cfg.reward.model.device


def judge_device(cfg: Config, device: str) -> str:
    """Returns where the self-hosted judges run, `cpu` or `cuda`. device: the trainer's."""
    return device if cfg.reward.judge.engine.device == "auto" else cfg.reward.judge.engine.device


def pools(cfg: Config, device: str) -> list[Pool]:
    """Returns the pools that need GPUs or labelled nodes, most constrained first: those with labels, then those with
    larger pieces. device: the trainer's."""
    found = [_ranks(cfg, device), _engines(cfg, device), _reward_model(cfg, device), _judges(cfg, device)]
    asking = [pool for pool in found if pool.count and (pool.gpus or pool.labels)]
    return sorted(asking, key=lambda pool: (not pool.labels, -pool.gpus))


def count_gpus(cfg: Config, device: str) -> int:
    return sum(pool.all_gpus for pool in pools(cfg, device))


def _ranks(cfg: Config, device: str) -> Pool:
    size, shared = ranks_of_a_piece(cfg), shares_gpus(cfg)
    what, keys = "share a sequence", "`actor.ulysses_sequence_parallel_size`"
    if shared:
        what, keys = f"{what} or an engine", f"{keys}, `rollout.vllm.tensor_parallel_size`"
    return Pool(
        name=RANKS,
        about="actors and engines together (`actor.num_workers`, `trainer.colocate`)"
        if shared
        else "the actors (`actor.num_workers`)",
        piece=f"the {size} ranks that {what} ({keys})",
        count=cfg.actor.num_workers // size,
        gpus=size if device == "cuda" else 0,
        cpus=size * (1 + (cfg.rollout.engines_per_gpu if shared else 0)) if device == "cuda" else 0,  # one per process
        count_key="actor.num_workers",
        per_piece=size,
        labels=cfg.actor.node_labels,
        labels_key="actor.node_labels",
    )


def _engines(cfg: Config, device: str) -> Pool:
    """Engines with GPUs of their own; none if all engines share GPUs with the ranks."""
    gpus = gpus_per_engine(cfg.rollout.vllm)
    count = 0 if shares_gpus(cfg) and not lends(cfg) and device == "cuda" else cfg.rollout.num_engines
    return Pool(
        name=ENGINES,
        about=f"rollout (`rollout.num_engines` {count} x {gpus} each)",
        piece=f"the {gpus} GPUs of an engine (`rollout.vllm.tensor_parallel_size`)",
        count=count,
        gpus=gpus if device == "cuda" else 0,
        cpus=1 if device == "cuda" else 0,
        count_key="rollout.num_engines",
        per_piece=1,
        labels=cfg.rollout.node_labels,
        labels_key="rollout.node_labels",
    )


def _reward_model(cfg: Config, device: str) -> Pool:
    """The copies of the reward model; a piece is the copies that share one GPU."""
    model = cfg.reward.model
    on_gpu = reward_model_device(cfg, device) == "cuda"
    sharing = int(1 / model.num_gpus) if on_gpu else 1
    return Pool(
        name=REWARD_MODEL,
        about="the reward model (`reward.model.num_workers` x `num_gpus`)",
        piece=f"{sharing} copies of the reward model (`reward.model.num_gpus`)",
        count=math.ceil(model.num_workers / sharing) if model.path else 0,
        gpus=int(on_gpu),
        cpus=sharing if on_gpu else 0,
        count_key="reward.model.num_workers",
        per_piece=sharing,
        labels=model.node_labels,
        labels_key="reward.model.node_labels",
    )


def _judges(cfg: Config, device: str) -> Pool:
    engine = cfg.reward.judge.engine
    gpus = gpus_per_engine(engine.vllm) if judge_device(cfg, device) == "cuda" else 0
    return Pool(
        name=JUDGES,
        about=f"the judge (`reward.judge.engine.num_engines` {engine.num_engines} x {gpus} each)",
        piece=f"the {gpus} GPUs of a judge (`reward.judge.engine.vllm.tensor_parallel_size`)",
        count=engine.num_engines if engine.path else 0,
        gpus=gpus,
        cpus=1 if gpus else 0,
        count_key="reward.judge.engine.num_engines",
        per_piece=1,
        labels=engine.node_labels,
        labels_key="reward.judge.engine.node_labels",
    )
