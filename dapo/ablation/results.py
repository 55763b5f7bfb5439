"""Reads the finished runs of the ablation ladder back for the report and computes the statistics over seeds.

In: OUT/RUNG-seedS of `dapo.ablation`, each with metrics.jsonl and config.yaml. Out: curves by rung and seed. A seed
counts when all its rungs are finished; what is left out is named. Intervals are Student's t at 95 %.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dapo.plot import series
from dapo.report.log import METRICS, read_metrics
from dapo.state.run_dir import CONFIG


@dataclass(frozen=True, slots=True)
class Rung:
    """Describes a row of the table. against: the rung that it is compared with. paper: accuracy in per cent in the
    paper's Table 1 (AIME 2024, avg@32)."""

    label: str
    against: str = ""
    paper: int | None = None


# In order: the paper's ladder, and beside it the other filter that verl's recipe for DAPO compares (arXiv 2503.14476).
RUNGS = {
    "grpo": Rung("naive GRPO", "", 30),
    "overlong_filtering": Rung("+ overlong filtering", "grpo", 36),
    "clip_higher": Rung("+ clip-higher", "overlong_filtering", 38),
    "soft_overlong": Rung("+ soft overlong punishment", "clip_higher", 41),
    "token_mean": Rung("+ token-level loss", "soft_overlong", 42),
    "dynamic_sampling": Rung("+ dynamic sampling (DAPO)", "token_mean", 50),
    "filter_by_reward": Rung("filter on shaped reward instead", "dynamic_sampling"),
}
# What is read of every step, beside the totals.
MEASURED: dict[str, Callable[[dict[str, Any]], float]] = {
    "entropy": lambda record: record.get("actor/entropy", math.nan),
    "length": lambda record: record["rollout/response_length_mean"],
    "truncated": lambda record: record["rollout/truncated"],
    "clipped": lambda record: record.get("actor/clip_fraction", math.nan),
    "grad_norm": lambda record: record.get("actor/grad_norm", math.nan),
    "all_correct": lambda record: record["buffer/all_correct"] / record["buffer/drawn"],
    "all_wrong": lambda record: record["buffer/all_wrong"] / record["buffer/drawn"],
}
# t_{0.975} of Student's t for 1 to 30 degrees of freedom, as in any statistical table.
T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Holds one finished run. Made by `read_run`, consumed by `dapo.ablation.report`.

    accuracy: (step, held-out accuracy) of each evaluation. optimizer_steps, tokens, seconds: totals after each step,
    [0] = 0; tokens are all generated ones: trained, dropped and aborted. of_steps: by name of `MEASURED`, one value per
    step.
    """

    accuracy: tuple[tuple[int, float], ...]
    optimizer_steps: tuple[float, ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    of_steps: dict[str, tuple[float, ...]]

    @property
    def final(self) -> float:
        """Returns the held-out accuracy at the last evaluation."""
        return self.accuracy[-1][1]

    def first(self, name: str) -> float:
        """Returns what a name of `MEASURED` had in the first step."""
        return self.of_steps[name][0]

    def late(self, name: str) -> float:
        """Returns the mean over the last quarter of the steps, one at least."""
        values = self.of_steps[name]
        return statistics.fmean(values[-max(1, len(values) // 4) :])


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Holds a mean over seeds. half_width: of its 95 % Student-t interval; NaN with fewer than two seeds."""

    mean: float
    half_width: float

    @property
    def resolved(self) -> bool:
        """Says whether the interval leaves out 0."""
        return abs(self.mean) > self.half_width  # False for NaN

    def shown(self, form: str) -> str:
        """Returns mean ± half width, in the form that the mean is given in, without its sign for the latter."""
        half_width = "-" if math.isnan(self.half_width) else format(self.half_width, form.removeprefix("+"))
        return f"{self.mean:{form}} ± {half_width}"


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean and t_{0.975, n-1} · s / sqrt(n), s with ddof 1. Beyond 31 values the quantile of 30 degrees is
    kept."""
    if len(values) < 2:
        return Estimate(mean=statistics.fmean(values), half_width=math.nan)
    quantile = T_975[min(len(values) - 1, len(T_975)) - 1]
    return Estimate(
        mean=statistics.fmean(values), half_width=quantile * statistics.stdev(values) / math.sqrt(len(values))
    )


def run_folder(out: Path, rung: str, seed: int) -> Path:
    """Returns the folder in which the ladder puts a run."""
    return out / f"{rung}-seed{seed}"


def read_run(folder: Path) -> Curve | str:
    """Reads the run in `folder`, or says why it does not count."""
    if not (folder / METRICS).is_file() or not (folder / CONFIG).is_file():
        return "missing"
    total = OmegaConf.load(folder / CONFIG).trainer.total_steps
    records = read_metrics(folder / METRICS)
    steps = {record["step"]: record for record in records if "buffer/trained_tokens" in record}
    accuracy = tuple(zip(*series(records, "eval/accuracy"), strict=True))
    if sorted(steps) != list(range(1, total + 1)):
        return f"{len(steps)} of {total} steps"
    if not accuracy or accuracy[-1][0] != total:
        return f"no evaluation at step {total}"
    ordered = [steps[step] for step in range(1, total + 1)]
    return Curve(
        accuracy=accuracy,
        optimizer_steps=_totals([record.get("actor/optimizer_steps", 1.0) for record in ordered]),
        tokens=_totals([generated_tokens(record) for record in ordered]),
        seconds=_totals([record["perf/step_s"] for record in ordered]),
        of_steps={name: tuple(measure(record) for record in ordered) for name, measure in MEASURED.items()},
    )


def _totals(values: Sequence[float]) -> tuple[float, ...]:
    return (0.0, *accumulate(values))


def generated_tokens(record: dict[str, Any]) -> float:
    """Counts every token that the engines generated for a step, used or not."""
    return sum(record[name] for name in ("buffer/trained_tokens", "buffer/dropped_tokens", "perf/aborted_tokens"))


def read_ladder(out: Path, rungs: Sequence[str], seeds: Sequence[int]) -> tuple[dict[str, dict[int, Curve]], list[str]]:
    """Returns curves by rung and seed for every seed whose rungs are all finished, and one line per run that is not.

    Raises ValueError when no seed is whole.
    """
    runs = {(rung, seed): read_run(run_folder(out, rung, seed)) for seed in seeds for rung in rungs}
    faults = {key: run for key, run in runs.items() if isinstance(run, str)}
    whole = [seed for seed in seeds if not any(rung_seed[1] == seed for rung_seed in faults)]
    unfinished = [f"seed {seed}: {rung} ({why})" for (rung, seed), why in faults.items()]
    if not whole:
        raise ValueError(
            f"{out} has no seed with all its rungs finished: {'; '.join(unfinished)}; run the ladder to its end, or "
            "name the finished rungs with --rungs and the seeds with --seeds"
        )
    curves = {rung: {seed: run for seed in whole if isinstance(run := runs[rung, seed], Curve)} for rung in rungs}
    return curves, unfinished
