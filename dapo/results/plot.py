"""Draws the learning curves of runs as one PNG: accuracy, response length and entropy against the step, tokens or
seconds. Runs whose names differ in the seed only have one colour. Needs matplotlib, of the `dev` extra."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapo.results.runs import Run, positions
from dapo.state.changes import value_of

# (title, metric, whether it is measured occasionally and drawn as points)
PANELS = (
    ("held-out accuracy", "eval/accuracy", True),
    ("accuracy of drawn groups", "rollout/accuracy", False),
    ("response length (tokens)", "rollout/response_length_mean", False),
    ("entropy (nats per token)", "actor/entropy", False),
)
AXES = {"step": "step", "tokens": "tokens generated", "seconds": "seconds of all steps"}
# Okabe and Ito's colours, distinguishable with colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MISSING = "matplotlib is not installed; `pip install matplotlib`, or install the `dev` extra of dapo"
SEED = re.compile(r"[-_/]?seed[-_]?\d+$")


def series(records: Sequence[dict[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Returns (steps, values) of one metric in step order, without NaN; the last record of a step wins."""
    found = {record["step"]: record[metric] for record in records if not math.isnan(record.get(metric, math.nan))}
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def title_of(runs: Sequence[Run]) -> str:
    """Returns the name and the model of the only run; several are in the legend."""
    return f"{runs[0].name}: {value_of(runs[0].config, 'model.path')}"[:90] if len(runs) == 1 else ""


def draw(runs: dict[str, Any], out: Path, against: Sequence[str] = ("step",), title: str = "") -> None:
    """Draws `runs`, the records of each by label, to `out`. against: of `AXES`; one column each if there are several.
    Runs that differ in their seeds only share a colour. Raises ValueError when matplotlib is missing or `out` cannot be
    written."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(MISSING) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    rows, columns = (2, 2) if len(against) == 1 else (len(PANELS), len(against))
    size = (9.0, 5.6) if len(against) == 1 else (4.2 * columns, 2.5 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, sharex="col", layout="constrained")
    kinds = kinds_of(list(runs))
    colours = {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(dict.fromkeys(kinds))}
    width = 1.6 if len(runs) == 1 else 1.2  # overlaid runs need thinner lines
    cells = [(panel, each) for panel in PANELS for each in against]
    for axis, ((name, metric, points), each) in zip(axes.flat, cells, strict=True):
        for kind, records in zip(kinds, runs.values(), strict=True):
            at = positions(records, each)
            known = [(at[step], value) for step, value in zip(*series(records, metric), strict=True) if step in at]
            # Held-out points are joined by a line to be easier to follow; one point alone has no line.
            look: dict[str, Any] = {"marker": "o", "markersize": 4.5} if points or len(known) == 1 else {}
            axis.plot([x for x, _ in known], [y for _, y in known], color=colours[kind], linewidth=width, **look)
        axis.set_title(name, loc="left", fontsize=10)
        axis.grid(True, color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        _limits(axis, metric, each)
    for number, axis in enumerate(axes[-1]):
        axis.set_xlabel(AXES[against[number % len(against)]])
    figure.suptitle(title, fontsize=11)
    if len(runs) > 1:
        lines = [plt.Line2D([], [], color=colour, linewidth=2) for colour in colours.values()]
        figure.legend(lines, list(colours), loc="outside lower center", ncols=min(4, len(colours)), frameon=False)
    try:
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"{out} cannot be written ({error}); give a .png in an existing folder") from error
    finally:
        plt.close(figure)


def kinds_of(labels: Sequence[str]) -> list[str]:
    """Returns the labels without seeds if several runs then share one; else unchanged."""
    kinds = [SEED.sub("", label) for label in labels]
    return kinds if all(kinds) and len(set(kinds)) < len(kinds) else list(labels)


def _limits(axis: Any, metric: str, against: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if against != "step":
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_ylim(0.0, 1.0 if "accuracy" in metric else None)
