"""Checks of `reward`: the times of its workers, the function `code` and its sandbox, a judge that the run starts, the
reward model."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dapo.config.facts.model_shape import UnknownShape, read_config
from dapo.config.names import JUDGE, nearest
from dapo.config.paths import checked_path, resolve_path
from dapo.config.reward import JudgeEngineConfig, RewardFunctionConfig
from dapo.config.rules.engine import arguments
from dapo.config.rules.model import division_problems, model_directory, window_problems
from dapo.config.schema import Config

CODE = ("code", "dapo.rewards.code")
CODE_OPTIONS = {"partial": "true or false", "max_tests": "a whole number, 0 for all tests"}
KEY, WINDOW = "reward.judge.engine", "max_model_len"
# Arguments that dapo sets itself, and the key to use instead.
OWN_JUDGE_ARGS = {
    "model": f"`{KEY}.path`",
    "trust_remote_code": f"`{KEY}.trust_remote_code`",
    "data_parallel_size": f"`{KEY}.num_engines`",
}
HEAD = "ForSequenceClassification"
DEFAULT_LABELS = 2  # transformers' default without num_labels in config.json


def waits(cfg: Config) -> Iterator[str]:
    limits = cfg.reward.limits
    if 2 * limits.cpu_s > limits.wall_s:
        yield (
            f"`reward.limits.wall_s` ({limits.wall_s:g}) must be at least twice `reward.limits.cpu_s` "
            f"({limits.cpu_s:g}), or a response that computes without end never reaches its CPU limit; raise the one "
            "or lower the other"
        )
    if cfg.reward.timeout_s <= cfg.reward.remote.timeout_s:
        yield (
            f"`reward.timeout_s` ({cfg.reward.timeout_s:g}) must be longer than `reward.remote.timeout_s` "
            f"({cfg.reward.remote.timeout_s:g}), or a worker passes for lost while it waits for others; raise the one "
            "or lower the other"
        )
    if cfg.reward.timeout_s <= 2 * limits.wall_s:
        yield (
            f"`reward.timeout_s` ({cfg.reward.timeout_s:g}) must be more than twice `reward.limits.wall_s` "
            f"({limits.wall_s:g}), or a worker passes for lost while responses take their time; raise the one or lower "
            "the other"
        )


def code(cfg: Config) -> Iterator[str]:
    entries = [(index, spec) for index, spec in enumerate(cfg.reward.functions) if spec.path in CODE]
    for index, spec in entries:
        yield from _code_options(f"reward.functions[{index}]", spec)
    if entries:
        yield from _sandbox_times(cfg)


def _code_options(key: str, spec: RewardFunctionConfig) -> Iterator[str]:
    for name, value in spec.kwargs.items():
        if name not in CODE_OPTIONS:
            yield f"`{key}.kwargs.{name}` is no option of `code`; {nearest(name, CODE_OPTIONS)}".rstrip("; ")
        elif name == "partial" and not isinstance(value, bool):
            yield f"`{key}.kwargs.partial` ({value}) must be {CODE_OPTIONS[name]}"
        elif name == "max_tests" and (type(value) is not int or value < 0):
            yield f"`{key}.kwargs.max_tests` ({value}) must be {CODE_OPTIONS[name]}"


def _sandbox_times(cfg: Config) -> Iterator[str]:
    limits, sandbox = cfg.reward.limits, cfg.reward.limits.sandbox
    if not sandbox.cpu_s <= sandbox.wall_s <= sandbox.total_s:
        yield (
            f"`reward.limits.sandbox.cpu_s` ({sandbox.cpu_s:g}) must be at most `reward.limits.sandbox.wall_s` "
            f"({sandbox.wall_s:g}), and that at most `reward.limits.sandbox.total_s` ({sandbox.total_s:g}), the time "
            "of all tests of one response; raise the latter"
        )
    if 2 * sandbox.total_s > limits.wall_s:
        yield (
            f"`reward.limits.wall_s` ({limits.wall_s:g}) must be at least twice `reward.limits.sandbox.total_s` "
            f"({sandbox.total_s:g}), or a response is given up before its tests have had their time; raise the one "
            "(and `reward.timeout_s`) or lower the other"
        )


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
    yield from arguments(JUDGE, engine.vllm, OWN_JUDGE_ARGS)
    with suppress(UnknownShape):  # reported above, or a hub name that is not in the cache
        yield from _judge_model(engine, read_config(engine.path))


def _judge_model(engine: JudgeEngineConfig, config: dict[str, Any]) -> Iterator[str]:
    """Reports what a server would refuse in its model. config: its config.json."""
    named, window = f"`{KEY}.path` ({engine.path})", engine.vllm.get(WINDOW)
    yield from division_problems(JUDGE, engine.vllm, named, config)
    if isinstance(window, int):
        yield from window_problems(f"`{JUDGE}.{WINDOW}` ({window})", window, named, config, engine.vllm)


def reward_model(cfg: Config) -> Iterator[str]:
    if not cfg.reward.model.path:
        return
    yield from _tokens(cfg)
    try:
        path = Path(checked_path(cfg.reward.model.path, key="reward.model.path"))
    except ValueError as error:
        yield str(error)
        return
    if path.exists():
        yield from _directory(cfg, path)


def head_problems(path: str, architectures: Sequence[str], num_labels: int) -> Iterator[str]:
    """Refuses a model without a trained score head: transformers would add a random one, and scores would be noise."""
    named = ", ".join(architectures) or "none"
    if not any(name.endswith(HEAD) for name in architectures):
        yield (
            f"`reward.model.path` ({path}) must be a sequence-classification model, and its architecture is {named}, "
            f"which has no trained head for scores; take a reward model whose config.json names a class *{HEAD}"
        )
    elif num_labels != 1:
        yield (
            f"`reward.model.path` ({path}) must have one label, the reward, and has {num_labels}; take a model "
            "trained as a reward model, not as a classifier"
        )


def _tokens(cfg: Config) -> Iterator[str]:
    model = cfg.reward.model
    if model.max_length > model.max_tokens:
        yield (
            f"`reward.model.max_length` ({model.max_length}) must be at most `reward.model.max_tokens` "
            f"({model.max_tokens}), which bounds a forward pass; raise the latter"
        )
    yield from _too_short("`reward.model.max_tokens`", model.max_tokens, cfg)


def _directory(cfg: Config, path: Path) -> Iterator[str]:
    name = cfg.reward.model.path
    try:
        said: Any = json.loads((path / "config.json").read_text())
        if not isinstance(said, dict):
            raise ValueError("no object")
    except (OSError, ValueError):
        yield f"`reward.model.path` ({name}) holds no readable config.json; give the directory of a Hugging Face model"
        return
    labels = said.get("id2label")
    num_labels = len(labels) if labels else said.get("num_labels", DEFAULT_LABELS)
    yield from head_problems(name, said.get("architectures") or (), num_labels)
    window = said.get("max_position_embeddings")
    if window is None:
        return
    if cfg.reward.model.max_length > window:
        yield (
            f"`reward.model.max_length` ({cfg.reward.model.max_length}) must be at most {window}, the positions that "
            f"the model in `reward.model.path` ({name}) has; lower it"
        )
    yield from _too_short(f"`max_position_embeddings` of `reward.model.path` {name}", window, cfg)


def _too_short(what: str, tokens: int, cfg: Config) -> Iterator[str]:
    """Finds large mismatches only: tokenizers may differ. Skipped where the user set `max_length`."""
    prompt, response = cfg.data.max_prompt_length, cfg.data.max_response_length
    if not cfg.reward.model.max_length and 1 <= tokens < prompt + response:
        yield (
            f"{what} ({tokens}) must hold `data.max_prompt_length` + `data.max_response_length` ({prompt} + "
            f"{response} = {prompt + response}), because longer conversations are unscorable; raise it or take another "
            "model, lower the lengths, or set `reward.model.max_length` to accept that"
        )
