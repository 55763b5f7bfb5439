"""Holds the run that is looked at, and loads its model's shape, tokenizer and data once, when a check first asks.

In: a configuration. Out: what the checks of it share.
"""

import os
from dataclasses import fields, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from dapo.config.facts.model_shape import ModelShape, UnknownShape, read_config, shape_of
from dapo.config.paths import resolve_path
from dapo.config.plan import PlannedConfig
from dapo.config.schema import Config
from dapo.data.prompts import DataReport
from dapo.data.sources import load_held_out, load_train
from dapo.data.tokenizer import load_tokenizer
from dapo.derived import device_of
from dapo.plan.actor import ActorMemory
from dapo.plan.terms import together
from dapo.types import HeldOut, Prompt


class Subject:
    """Holds one run. cfg: checked; without the planner's assumptions the default ones count."""

    def __init__(self, cfg: Config) -> None:
        given = {field.name: getattr(cfg, field.name) for field in fields(cfg)}
        self.cfg = PlannedConfig(**given)

    @property
    def address(self) -> str:
        """Returns the Ray cluster that the run joins; empty where it starts one of its own."""
        address = self.cfg.trainer.ray_address or os.environ.get("RAY_ADDRESS", "")
        return "" if address == "local" else address

    @property
    def uses_gpus(self) -> bool:
        """Returns whether the run computes on GPUs, as the planner decides it."""
        return device_of(self.cfg) == "cuda"

    @cached_property
    def shape(self) -> ModelShape | None:
        """Returns the model's shape; None where the planner does not know its architecture."""
        try:
            return shape_of(read_config(self.cfg.model.path), self.cfg.model.path)
        except UnknownShape:
            return None

    @property
    def checkpoint_bytes(self) -> float | None:
        """Returns the planner's bytes of one checkpoint on disk; None where it does not know the model."""
        return None if self.shape is None else together(ActorMemory(self.cfg, self.shape).checkpoint())

    @cached_property
    def tokenizer(self) -> Any:
        """Returns the model's tokenizer, as a run loads it. Raises as that does."""
        return load_tokenizer(replace(self.cfg.model, path=resolve_path(self.cfg.model.path)))

    @cached_property
    def prompts(self) -> tuple[list[Prompt], DataReport]:
        """Returns the training prompts and what became of their rows. Raises ValueError."""
        return load_train(self.cfg, self.tokenizer, today=datetime.now())

    def held_out(self) -> list[HeldOut]:
        """Returns the held-out sets. Raises ValueError."""
        return load_held_out(self.cfg, self.tokenizer)
