"""Compares a replayed step with what the run recorded: metrics of the update, and weights."""

import math
from dataclasses import dataclass
from pathlib import Path

from dapo.report.log import read_metrics
from dapo.state.run_dir import CHECKPOINTS, METRICS

OF_THE_UPDATE = ("actor/", "parity/", "batch/")
SHOWN = ("actor/loss", "actor/grad_norm", "actor/entropy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a replay. Made by `outcome`. metrics: (recorded, replayed) by name, NaN for a missing number. weights:
    largest absolute difference per parameter of the exported models; None if the run kept no exported model of this
    step."""

    metrics: dict[str, tuple[float, float]]
    weights: dict[str, float] | None

    @property
    def differing(self) -> dict[str, tuple[float, float]]:
        return {name: pair for name, pair in self.metrics.items() if not _same(*pair)}

    @property
    def same(self) -> bool:
        return not self.differing and not any(self.weights.values() if self.weights else ())


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def outcome(run: Path, replayed: Path, step: int) -> Outcome:
    """Raises ValueError if the run has no line of metrics for the step."""
    there, here = _line(run, step), _line(replayed, step)
    names = sorted(name for name in there.keys() | here.keys() if name.startswith(OF_THE_UPDATE))
    metrics = {name: (there.get(name, math.nan), here.get(name, math.nan)) for name in names}
    return Outcome(metrics=metrics, weights=_weights(run, replayed, step))


def _line(run: Path, step: int) -> dict[str, float]:
    path = run / METRICS
    for line in read_metrics(path) if path.is_file() else ():
        if line["step"] == step and "actor/loss" in line:
            return {name: float(value) for name, value in line.items()}
    raise ValueError(f"{path} has no line for an update of step {step}")


def _weights(run: Path, replayed: Path, step: int) -> dict[str, float] | None:
    folders = [each / CHECKPOINTS / f"step_{step:06d}" / "hf" for each in (run, replayed)]
    if not all(folder.is_dir() for folder in folders):
        return None
    from safetensors.torch import load_file

    one, other = (
        {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
        for folder in folders
    )
    if one.keys() != other.keys():
        return dict.fromkeys(one.keys() ^ other.keys(), math.inf)
    return {
        name: 0.0 if one[name].equal(other[name]) else float((one[name].float() - other[name].float()).abs().max())
        for name in one
    }


def words(found: Outcome, step: int) -> str:
    rows = {name: found.metrics[name] for name in SHOWN if name in found.metrics} | found.differing
    width = max(map(len, rows), default=0)
    lines = [
        f"{name:{width}}  {there!r:>24}  {here!r:>24}{'' if _same(there, here) else '  differs'}"
        for name, (there, here) in rows.items()
    ]
    equal = len(found.metrics) - len(found.differing)
    verdict = f"step {step} again: {equal} of {len(found.metrics)} metrics of the update are equal to the bit"
    if found.weights is None:
        verdict += "; the run kept no exported model of this step to compare weights with"
    elif largest := max(found.weights.values(), default=0.0):
        off = sum(map(bool, found.weights.values()))
        verdict += f"; {off} of {len(found.weights)} parameters differ, by {largest:.3g} at most"
    else:
        verdict += f", and all {len(found.weights)} parameters"
    head = f"{'':{width}}  {'recorded':>24}  {'replayed':>24}"
    return "\n".join([head, *lines, verdict])
