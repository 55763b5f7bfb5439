"""Checks of `reward.model`. Its worker repeats those of the model itself when it loads it."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dapo.config.paths import checked_path
from dapo.config.schema import Config

HEAD = "ForSequenceClassification"
DEFAULT_LABELS = 2  # transformers' default without num_labels in config.json


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
