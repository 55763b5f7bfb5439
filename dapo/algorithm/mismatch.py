"""Splits the difference of log-probabilities between engines and actors by cause, from a few tokens that an engine has
just sampled: each cause is switched off in the actors' forward pass, and what the difference loses is its part.

| cause | switched off by |
|---|---|
| temperature | the temperature at which the actors' log-probabilities of the likely tokens have the engine's spread |
| support | the actors' probabilities over the tokens that the engine could sample |
| head | logits in the other type: float32 where they are rounded, rounded to bfloat16 where they are not |
| router | the experts that the engine has used |
| staleness | (tokens of the batch are compared with fresh ones) |
| kernels | what is left with all switched off |
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dapo.types import TrainSequence

PROBES, SAMPLED = 8, 64  # responses, and their tokens at most
LIKELY = 20  # most likely tokens of each position; what vLLM returns without another setting
WHOLE = 1 - 1e-4  # probability of the engine's likely tokens from which on they are all that it could sample
TAIL = 99  # percentile
SWITCHED = ("temperature", "support", "head", "router")
Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """How the actors' forward pass is changed. temperature: factor of the configured one. other_head: logits in the
    other type. own_experts: the actors choose experts themselves, also where the engine has returned its own."""

    temperature: float = 1.0
    other_head: bool = False
    own_experts: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """Log-probabilities of all sampled tokens of some responses: own [S], and of the likely tokens [S, K], NaN beyond
    their number."""

    own: Values
    likely: Values


def engine_probe(sequences: Sequence[TrainSequence]) -> Probe:
    parts = [sequence.support for sequence in sequences if sequence.support is not None]
    counts = np.concatenate([part.counts for part in parts])
    likely = np.full((len(counts), counts.max(initial=1)), np.nan)
    likely[np.arange(likely.shape[1]) < counts[:, None]] = np.concatenate([part.logprobs for part in parts])
    return Probe(np.concatenate([sequence.rollout_logprobs for sequence in sequences]).astype(np.float64), likely)


def actor_probe(rows: Sequence[NDArray[np.float32]], width: int) -> Probe:
    """rows: of each response [S, 1 + K], its own K; own token first."""
    padded = [np.pad(row, ((0, 0), (0, 1 + width - row.shape[1])), constant_values=np.nan) for row in rows]
    values = np.concatenate(padded).astype(np.float64)
    return Probe(values[:, 0], values[:, 1:])


def temperature_factor(engine: Probe, actor: Probe) -> float:
    """Returns the factor of the actors' temperature at which their log-probabilities of the likely tokens differ among
    each other as the engine's do: least squares within each position, in which normalization has no part."""
    theirs, ours = (probe.likely - probe.likely[:, :1] for probe in (engine, actor))
    slope = np.nansum(theirs * ours) / max(np.nansum(ours * ours), 1e-12)
    return 1.0 if slope <= 0 else float(1 / slope)


def over_support(engine: Probe, actor: Probe) -> Values:
    """Returns the actors' log-probabilities over the likely tokens where the engine could sample no other."""
    theirs, ours = (np.nansum(np.exp(probe.likely), axis=1) for probe in (engine, actor))
    return np.where(theirs >= WHOLE, actor.own - np.log(np.clip(ours, 1e-12, None)), actor.own)


def helps(engine: Probe, variants: Mapping[str, Probe]) -> list[str]:
    """Returns the causes that bring the actors nearer to the engine when they are switched off."""
    differences = {name: np.abs(probe.own - engine.own).mean() for name, probe in variants.items()}
    return [cause for cause in SWITCHED if differences.get(cause, np.inf) < differences["as_is"]]


def together(variants: Sequence[Variant]) -> Variant:
    return Variant(
        temperature=math.prod(variant.temperature for variant in variants),
        other_head=any(variant.other_head for variant in variants),
        own_experts=all(variant.own_experts for variant in variants),
    )


def budget(engine: Probe, variants: Mapping[str, Probe], *, stale: float, replays: bool = False) -> dict[str, float]:
    """Returns the metrics `mismatch/`, in nats. variants: the actors' values "as_is", with single ones `SWITCHED`
    off, and with "all" of them that help. stale: the mean difference over the last batch. replays: whether the actors
    use the engine's experts as they are, so that "router" is without."""
    differences = {name: np.abs(probe.own - engine.own) for name, probe in variants.items()}
    differences["support"] = np.abs(over_support(engine, variants["as_is"]) - engine.own)
    ends = differences["all"], np.abs(over_support(engine, variants["all"]) - engine.own)
    rest, found = min(ends, key=np.mean), {}
    for name, measure in ("mean", np.mean), ("tail", lambda values: np.percentile(values, TAIL)):
        whole = float(measure(differences["as_is"]))
        found[f"mismatch/{name}"] = whole
        for cause in SWITCHED:
            if cause in differences:
                change = whole - float(measure(differences[cause]))
                found[f"mismatch/{cause}_{name}"] = max(0.0, -change if cause == "router" and replays else change)
        found[f"mismatch/kernels_{name}"] = float(measure(rest))
    found["mismatch/staleness_mean"] = max(0.0, stale - found["mismatch/mean"])
    return found
