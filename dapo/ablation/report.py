"""Writes the ablation ladder's result as a table and a picture (arXiv 2503.14476, Table 1).

In: the finished runs under OUT (`dapo.ablation.results`). Out: OUT/ablation.md, one row per rung, and OUT/ablation.png,
held-out accuracy against optimizer steps and against generated tokens. What lies within its 95 % interval is called
unresolved. The picture needs matplotlib, of the `dev` extra.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dapo.ablation.results import RUNGS, Curve, Estimate, estimate, read_ladder
from dapo.plot import COLOURS, frame, legend, pyplot, write
from dapo.report.table import table as markdown_table
from dapo.state.durable import write_text

TABLE, PICTURE = "ablation.md", "ablation.png"
UNRESOLVED = "unresolved"
COLUMNS = (
    "rung",
    "held-out accuracy",
    "difference to the rung above",
    "generated tokens (M)",
    "optimizer steps",
    "truncated, first → last step",
    "response length, last step",
    "seconds",
    "paper, another task (AIME 2024, %)",
)


def table(ladder: dict[str, dict[int, Curve]], unfinished: Sequence[str]) -> str:
    """Returns the Markdown table, and under it how to read it."""
    above: list[dict[int, Curve]] = [{}, *ladder.values()]
    rows = [_row(*rung, before) for rung, before in zip(ladder.items(), above, strict=False)]
    seeds = list(next(iter(ladder.values())))
    named = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    lines = [
        markdown_table(COLUMNS, rows),
        "",
        f"Mean over {named} ± half width of the 95 % Student-t interval; differences are paired by seed, and "
        f'"{UNRESOLVED}" where their interval contains 0. Tokens: all generated ones, also those of dropped and '
        "aborted groups. Overlong filtering keeps truncated responses out of the loss: they never train on their "
        "-1, but their reward stays in their group's mean and standard deviation and so shifts the baseline of the "
        "others. The paper's numbers are of a 32B model on AIME 2024 (avg@32): the order may be compared, no number.",
    ]
    if len(seeds) == 1:
        lines.append("One seed gives no interval: nothing here is resolved.")
    if unfinished:
        lines.append(f"Left out, because not all their rungs are finished: {'; '.join(unfinished)}.")
    return "\n".join(lines) + "\n"


def _row(rung: str, runs: dict[int, Curve], above: dict[int, Curve]) -> list[str]:
    curves = list(runs.values())
    gains = [run.final - above[seed].final for seed, run in runs.items()] if above else []
    first, last = (fmean([run.truncated[end] for run in curves]) for end in (0, 1))
    label, paper = RUNGS[rung]
    return [
        label,
        _interval(estimate([run.final for run in curves]), ".3f"),
        _difference(estimate(gains)) if gains else "",
        f"{fmean([run.tokens[-1] for run in curves]) / 1e6:.2f}",
        f"{fmean([run.optimizer_steps[-1] for run in curves]):.0f}",
        f"{first:.1%} → {last:.1%}",
        f"{fmean([run.last_length for run in curves]):.1f}",
        f"{fmean([run.seconds for run in curves]):.0f}",
        str(paper),
    ]


def _interval(value: Estimate, form: str) -> str:
    return f"{value.mean:{form}} ± {'-' if math.isnan(value.half_width) else format(value.half_width, '.3f')}"


def _difference(value: Estimate) -> str:
    return _interval(value, "+.3f") + ("" if value.resolved else f" ({UNRESOLVED})")


def draw(ladder: dict[str, list[Curve]], out: Path) -> None:
    """Writes the picture of `ladder`, one curve per seed by the label of its rung, to `out`.

    Raises ValueError when matplotlib is missing or `out` cannot be written.
    """
    plt = pyplot()
    figure, axes = plt.subplots(
        1, 3, figsize=(12.5, 4.6), sharey=True, layout="constrained", width_ratios=(1.0, 1.0, 0.8)
    )
    for number, curves in enumerate(ladder.values()):
        colour = COLOURS[number % len(COLOURS)]
        _draw_curve(axes[0], curves, [run.optimizer_steps for run in curves], colour)
        _draw_curve(axes[1], curves, [[count / 1e6 for count in run.tokens] for run in curves], colour)
        _draw_final(axes[2], number, [run.final for run in curves], colour)
    titles = ("held-out accuracy", "held-out accuracy", "after the last step, a dot per seed")
    for axis, title in zip(axes, titles, strict=True):
        frame(axis, title)
    axes[0].set(xlabel="optimizer steps", xlim=(0.0, None))
    axes[1].set(xlabel="generated tokens (millions)", xlim=(0.0, None))
    axes[2].set(xlabel="rung", xticks=range(len(ladder)), xticklabels=range(1, len(ladder) + 1))
    legend(figure, [f"{number}  {label}" for number, label in enumerate(ladder, 1)], 3)
    write(figure, out, "give a folder that can be")


def _draw_curve(axis: Any, curves: Sequence[Curve], totals: Sequence[Sequence[float]], colour: str) -> None:
    """Draws the mean over seeds at the steps that all of them evaluated, with its 95 % interval as a band.

    totals: per seed what the x axis counts, after each step.
    """
    by_step = [dict(run.accuracy) for run in curves]
    steps = sorted(set.intersection(*(set(found) for found in by_step)))
    x = [fmean(total[step] for total in totals) for step in steps]
    points = [estimate([found[step] for found in by_step]) for step in steps]
    axis.plot(x, [point.mean for point in points], color=colour, marker="o", markersize=3.5, linewidth=1.4)
    if len(curves) > 1:
        low = [point.mean - point.half_width for point in points]
        high = [point.mean + point.half_width for point in points]
        axis.fill_between(x, low, high, color=colour, alpha=0.10, linewidth=0)


def _draw_final(axis: Any, number: int, accuracies: Sequence[float], colour: str) -> None:
    final = estimate(accuracies)
    if not math.isnan(final.half_width):
        axis.errorbar([number], [final.mean], yerr=[final.half_width], color=colour, capsize=5, linewidth=1.6)
    axis.plot([number - 0.18, number + 0.18], [final.mean, final.mean], color=colour, linewidth=2.4)
    axis.plot([number + 0.3] * len(accuracies), list(accuracies), "o", color=colour, markersize=4)


def write_report(out: Path, rungs: Sequence[str], seeds: Sequence[int]) -> str:
    """Writes table and picture into `out` and returns the table.

    Raises ValueError when no seed is whole, or without matplotlib (the table is written then).
    """
    ladder, unfinished = read_ladder(out, rungs, seeds)
    text = table(ladder, unfinished)
    write_text(out / TABLE, text)
    draw({RUNGS[rung][0]: list(runs.values()) for rung, runs in ladder.items()}, out / PICTURE)
    return text
