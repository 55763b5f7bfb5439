"""Writes the ablation ladder's result as a table and a picture (arXiv 2503.14476, Table 1).

In: the finished runs under OUT (`dapo.ablation.results`). Out: OUT/ablation.md, one row per rung and one per claim, and
OUT/ablation.png: held-out accuracy against optimizer steps, generated tokens and seconds; entropy, length and clipped
tokens of each step. A difference whose 95 % interval contains 0 is called unresolved. The picture needs matplotlib, of
the `dev` extra.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dapo.ablation.claims import claims_table
from dapo.ablation.results import RUNGS, Curve, Estimate, estimate, read_ladder
from dapo.plot import COLOURS, frame, legend, pyplot, write
from dapo.report.table import table as markdown_table
from dapo.state.durable import write_text

TABLE, PICTURE = "ablation.md", "ablation.png"
UNRESOLVED = "unresolved"
COLUMNS = (
    "rung",
    "held-out accuracy",
    "difference",
    "to",
    "generated tokens (M)",
    "optimizer steps",
    "seconds",
    "groups all right, all wrong at the end",
    "truncated, first → at the end",
    "length, first → at the end",
    "entropy, first → at the end",
    "clipped",
    "paper, another task (AIME 2024, %)",
)


def table(ladder: dict[str, dict[int, Curve]], unfinished: Sequence[str]) -> str:
    """Returns the Markdown tables of rungs and claims, and under them how to read them."""
    places = {rung: number for number, rung in enumerate(ladder, 1)}
    rows = [_row(rung, ladder, places) for rung in ladder]
    seeds = list(next(iter(ladder.values())))
    named = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    lines = [
        markdown_table(COLUMNS, rows),
        "",
        f"Mean over {named} ± half width of the 95 % Student-t interval; differences are paired by seed, and "
        f'"{UNRESOLVED}" where their interval contains 0. Tokens: all generated ones, also those of dropped and '
        "aborted groups. At the end: mean over the last quarter of the steps. Clipped: share of tokens at a clip "
        "bound, mean over all steps. Overlong filtering keeps truncated responses out of the loss: they never train "
        "on their -1, but their reward stays in their group's mean and standard deviation and so shifts the baseline "
        "of the others. The paper's numbers are of a 32B model on AIME 2024 (avg@32): the order may be compared, no "
        "number.",
    ]
    if len(seeds) == 1:
        lines.append("One seed gives no interval: nothing here is resolved.")
    if unfinished:
        lines.append(f"Left out, because not all their rungs are finished: {'; '.join(unfinished)}.")
    claims = claims_table(ladder)
    return "\n".join([*lines, *(["", claims] if claims else [])]) + "\n"


def _row(rung: str, ladder: dict[str, dict[int, Curve]], places: dict[str, int]) -> list[str]:
    curves = list(ladder[rung].values())
    above = dict(zip(list(ladder)[1:], ladder, strict=False)).get(rung, "")
    against = RUNGS[rung].against if RUNGS[rung].against in ladder else above
    gains = [run.final - ladder[against][seed].final for seed, run in ladder[rung].items()] if against else []

    def mean(value: Callable[[Curve], float]) -> float:
        return fmean(map(value, curves))

    def course(name: str, form: str) -> str:
        return f"{mean(lambda run: run.first(name)):{form}} → {mean(lambda run: run.late(name)):{form}}"

    return [
        f"{places[rung]} {RUNGS[rung].label}",
        estimate([run.final for run in curves]).shown(".3f"),
        _difference(estimate(gains)) if gains else "",
        f"{places[against]}" if against else "",
        f"{mean(lambda run: run.tokens[-1]) / 1e6:.2f}",
        f"{mean(lambda run: run.optimizer_steps[-1]):.0f}",
        f"{mean(lambda run: run.seconds[-1]):.0f}",
        f"{mean(lambda run: run.late('all_correct')):.0%}, {mean(lambda run: run.late('all_wrong')):.0%}",
        course("truncated", ".1%"),
        course("length", ".0f"),
        course("entropy", ".3f"),
        f"{mean(lambda run: fmean(run.of_steps['clipped'])):.2%}",
        str(RUNGS[rung].paper or ""),
    ]


def _difference(value: Estimate) -> str:
    return value.shown("+.3f") + ("" if value.resolved else f" ({UNRESOLVED})")


def draw(ladder: dict[str, list[Curve]], out: Path) -> None:
    """Writes the picture of `ladder`, one curve per seed by the label of its rung, to `out`.

    Raises ValueError when matplotlib is missing or `out` cannot be written.
    """
    plt = pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(12.5, 8.0), layout="constrained")
    for number, curves in enumerate(ladder.values()):
        colour = COLOURS[number % len(COLOURS)]
        _draw_curve(axes[0, 0], curves, [run.optimizer_steps for run in curves], colour)
        _draw_curve(axes[0, 1], curves, [[count / 1e6 for count in run.tokens] for run in curves], colour)
        _draw_curve(axes[0, 2], curves, [run.seconds for run in curves], colour)
        for axis, name in zip(axes[1], ("entropy", "length", "clipped"), strict=True):
            _draw_steps(axis, [run.of_steps[name] for run in curves], colour)
    for axis, label in zip(axes[0], ("optimizer steps", "generated tokens (millions)", "seconds"), strict=True):
        frame(axis, "held-out accuracy")
        axis.set(xlabel=label, xlim=(0.0, None))
    for axis, title in zip(
        axes[1], ("entropy (nats per token)", "length (tokens)", "clipped tokens (share)"), strict=True
    ):
        frame(axis, title)
        axis.set(xlabel="rollout step")
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


def _draw_steps(axis: Any, runs: Sequence[Sequence[float]], colour: str) -> None:
    """Draws the mean over seeds of one value per step."""
    means = [fmean(values) for values in zip(*runs, strict=True)]
    axis.plot(range(1, len(means) + 1), means, color=colour, linewidth=1.2)


def write_report(out: Path, rungs: Sequence[str], seeds: Sequence[int]) -> str:
    """Writes table and picture into `out` and returns the table.

    Raises ValueError when no seed is whole, or without matplotlib (the table is written then).
    """
    ladder, unfinished = read_ladder(out, rungs, seeds)
    text = table(ladder, unfinished)
    write_text(out / TABLE, text)
    draw({RUNGS[rung].label: list(runs.values()) for rung, runs in ladder.items()}, out / PICTURE)
    return text
