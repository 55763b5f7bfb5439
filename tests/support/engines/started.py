"""Real engines on a CPU, for as long as a block runs."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dapo.config.paths import resolve_path
from dapo.config.schema import Config
from workers.engines.arguments import engine_args
from workers.placement import Placement
from workers.rollout import RolloutPool


@contextmanager
def started(
    loop: asyncio.Runner, cfg: Config, warn: Callable[[str], None] = lambda line: None
) -> Iterator[RolloutPool]:
    """The pool that a run makes of this configuration, with its engines up."""
    pool = RolloutPool(Placement(cfg, "cpu").rollout(), cfg.rollout, warn=warn)
    loop.run(pool.start(resolve_path(cfg.model.path), engine_args(cfg, "cpu")))
    try:
        yield pool
    finally:
        loop.run(pool.stop(3.0))
