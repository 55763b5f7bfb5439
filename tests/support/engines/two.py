"""Real engines on a CPU: two of a small random model, which the test files of a process share one after the other."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dapo.config.paths import resolve_path
from dapo.config.plan import PlannedConfig
from dapo.config.schema import Config
from dapo.tiny.random_model import make_random_model
from dapo.workers.engines.arguments import engine_args
from dapo.workers.placement import Placement
from dapo.workers.rollout import RolloutPool
from tests.support.local_actors import local_sync

LONG = 960  # a cap that ends hardly any response: they stop at random, after 110 tokens in the mean


@contextmanager
def started(
    loop: asyncio.Runner, cfg: Config, warn: Callable[[str], None] = lambda line: None
) -> Iterator[RolloutPool]:
    """The pool that a run makes of this configuration, with its engines up, for as long as the block runs."""
    pool = RolloutPool(Placement(cfg, "cpu").rollout(), cfg.rollout, warn=warn)
    loop.run(pool.start(resolve_path(cfg.model.path), engine_args(cfg, "cpu")))
    try:
        yield pool
    finally:
        loop.run(pool.stop(3.0))


def make_config(path: str, engines: int) -> PlannedConfig:
    cfg = PlannedConfig()
    cfg.model.path, cfg.model.dtype = path, "float32"
    cfg.data.max_prompt_length, cfg.data.max_response_length = 64, LONG
    cfg.rollout.num_engines = engines
    cfg.rollout.vllm = {"max_num_seqs": 64}
    cfg.rollout.start_timeout_s, cfg.rollout.timeout_s, cfg.rollout.stall_timeout_s = 300, 120, 60
    return cfg


class TwoEngines:
    """path: of the model. said: what the pool has warned of."""

    def __init__(self, loop: asyncio.Runner, folder: Path) -> None:
        self.path = str(make_random_model(folder, layers=2))
        self.said: list[str] = []
        self._loop = loop
        self._running = ExitStack()
        self._pool: RolloutPool | None = None

    def fresh(self) -> tuple[RolloutPool, torch.nn.Module]:
        """The pool, which serves version 0, and the same model in transformers."""
        if self._pool is None:
            cfg = make_config(self.path, 2)
            cfg.rollout.max_restarts = 100  # tests kill engines
            cfg.rollout.engines_per_gpu = 2  # each opens the actors' memory by handles of its own
            self._pool = self._running.enter_context(started(self._loop, cfg, self.said.append))
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        self._loop.run(local_sync(self._pool, model)(0))
        return self._pool, model

    def close(self) -> None:
        """Ends the engines; who asks for them once more gets others."""
        self._pool = None
        self._running.close()
