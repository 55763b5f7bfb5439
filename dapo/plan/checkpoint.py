"""Counts what one checkpoint takes on disk: a configuration in, terms in bytes out."""

from dapo.config.facts.model_shape import ModelShape
from dapo.config.plan import PlannedConfig
from dapo.plan.actor import ActorMemory
from dapo.plan.terms import Term, product


def checkpoint_terms(cfg: PlannedConfig, shape: ModelShape) -> tuple[Term, ...]:
    """Returns the bytes of one checkpoint on disk; buffer, cursor and tokenizer are small next to it, and all that a
    run without actors has."""
    if cfg.trainer.only == "rollout":
        return ()
    memory = ActorMemory(cfg, shape)
    terms = [product("parameters and Adam m, v, float32", 12, memory.trained)]
    if cfg.checkpoint.hf_export:
        terms.append(product(f"Hugging Face export, {cfg.model.dtype}", memory.element, shape.parameters))
    return tuple(terms)
