"""The run to check. Loads its model's shape, tokenizer and data once, on first use."""

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
    """cfg: a checked configuration; a plain `Config` gets the default `plan` section."""

    def __init__(self, cfg: Config) -> None:
        given = {field.name: getattr(cfg, field.name) for field in fields(cfg)}
        self.cfg = PlannedConfig(**given)

    @property
    def address(self) -> str:
        """The Ray cluster that the run joins; empty if it starts its own."""
        address = self.cfg.trainer.ray_address or os.environ.get("RAY_ADDRESS", "")
        return "" if address == "local" else address

    @property
    def uses_gpus(self) -> bool:
        return device_of(self.cfg) == "cuda"

    @cached_property
    def shape(self) -> ModelShape | None:
        try:
            return shape_of(read_config(self.cfg.model.path), self.cfg.model.path)
        except UnknownShape:
            return None

    @property
    def checkpoint_bytes(self) -> float | None:
        """Bytes of one checkpoint on disk; None if the planner does not know the model."""
        return None if self.shape is None else together(ActorMemory(self.cfg, self.shape).checkpoint())

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(replace(self.cfg.model, path=resolve_path(self.cfg.model.path)))

    @cached_property
    def prompts(self) -> tuple[list[Prompt], DataReport]:
        """Training prompts and the report on their rows. Raises ValueError."""
        return load_train(self.cfg, self.tokenizer, today=datetime.now())

    def held_out(self) -> list[HeldOut]:
        return load_held_out(self.cfg, self.tokenizer)
