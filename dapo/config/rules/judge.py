"""Checks of the judge that a run starts itself."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dapo.config.facts.model_shape import UnknownShape, read_config
from dapo.config.names import JUDGE
from dapo.config.paths import resolve_path
from dapo.config.reward import JudgeEngineConfig
from dapo.config.rules.engine import arguments
from dapo.config.rules.model import division_problems, model_directory, window_problems
from dapo.config.schema import Config

KEY, WINDOW = "reward.judge.engine", "max_model_len"
# Arguments that dapo sets itself, and the key to use instead.
OWN = {
    "model": f"`{KEY}.path`",
    "trust_remote_code": f"`{KEY}.trust_remote_code`",
    "data_parallel_size": f"`{KEY}.num_engines`",
}


def judge(cfg: Config) -> Iterator[str]:
    engine = cfg.reward.judge.engine
    if not engine.path:
        return
    if found := [*model_directory(f"{KEY}.path", engine.path)]:
        yield from found
    elif "/" not in engine.path and not Path(resolve_path(engine.path)).exists():
        yield (
            f"`{KEY}.path` ({engine.path}): no such directory in {Path.cwd()}; give an existing one, or a name on the "
            "hub, OWNER/NAME"
        )
    if cfg.reward.judge.url:
        yield (
            f"`reward.judge.url` ({cfg.reward.judge.url}) names a judge, and `{KEY}.path` ({engine.path}) lets the run "
            "start one; leave one of the two empty"
        )
    specs = [*cfg.reward.functions, *(spec for source in cfg.data.sources for spec in source.functions)]
    if not any(spec.path in ("judge", "dapo.rewards.judge") for spec in specs):
        yield (
            f"`{KEY}.path` ({engine.path}) lets the run start a judge, and no entry of `reward.functions` asks it; add "
            "{path: judge, wrong: 0.0}, or leave the key empty"
        )
    yield from arguments(JUDGE, engine.vllm, OWN)
    with suppress(UnknownShape):  # reported above, or a hub name that is not in the cache
        yield from _model(engine, read_config(engine.path))


def _model(engine: JudgeEngineConfig, config: dict[str, Any]) -> Iterator[str]:
    """Reports what a server would refuse in its model. config: its config.json."""
    named, window = f"`{KEY}.path` ({engine.path})", engine.vllm.get(WINDOW)
    yield from division_problems(JUDGE, engine.vllm, named, config)
    if isinstance(window, int):
        yield from window_problems(f"`{JUDGE}.{WINDOW}` ({window})", window, named, config, engine.vllm)
