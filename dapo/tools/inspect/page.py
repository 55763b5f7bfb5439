"""Writes one page that shows a run: `python -m dapo.inspect RUN --html FILE`. The file needs no server and loads
nothing: it has `assets/` and the data as JSON, of bounded size. Model output is inserted as text only, and no other
script may run."""

import base64
import hashlib
import json
import statistics
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from dapo.algorithm.fate import Fate
from dapo.ground.console import plain
from dapo.ground.table import duration, short
from dapo.report.store.reader import PHASES, Reader
from dapo.tools.inspect.findings import Figures, Finding, figures, findings
from dapo.tools.inspect.groups import browser

COLUMNS = 400  # of a chart; with more steps, each is the mean of several
LENGTH_BINS, RATE_BINS = 24, 10
MAX_SAMPLED = 200_000  # responses in the histogram of lengths; with more, one draw in so many is used
EVENTS = 200  # newest
SCRIPTS = ("draw.js", "charts.js", "groups.js", "main.js")  # in this order

Row = Mapping[str, Any]
Series = Mapping[int, float]  # by step


class Curve(NamedTuple):
    """A line chart. metrics: (name or pattern, label; for a pattern "": the part after "/"). note: for the reader.
    top: of the axis, if known. without: patterns of metrics that are left out."""

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    note: str = ""
    top: float | None = None
    without: tuple[str, ...] = ()

    def lines(self, names: Collection[str]) -> list[tuple[str, str]]:
        return [
            (name, label or name.partition("/")[2])
            for pattern, label in self.metrics
            for name in sorted(names)
            if fnmatchcase(name, pattern) and not any(fnmatchcase(name, one) for one in self.without)
        ]


CURVES = (
    Curve("Accuracy", "share", (("rollout/accuracy", "drawn groups"),), top=1.0),
    Curve("Reward", "", (("rollout/reward_mean", "drawn groups"), ("batch/reward_mean", "trained on"))),
    Curve(
        "Reward by function",
        "",
        (("reward/*", ""),),
        "means over the answers that have one",
        without=("reward/failed_*",),
    ),
    Curve("Answers whose scoring failed", "share", (("reward/failed_*", ""),), "by reason"),
    Curve(
        "Response length",
        "tokens",
        (("rollout/response_length_mean", "mean"), ("rollout/response_length_max", "longest")),
    ),
    Curve(
        "Truncated answers", "share", (("rollout/truncated", "at the cap"), ("batch/filtered", "left out of the loss"))
    ),
    Curve("Entropy", "nats", (("actor/entropy", "policy"),), "mean over the tokens trained on"),
    Curve("KL divergence", "nats", (("actor/approx_kl", "to the policy before"), ("actor/ref_kl", "to the reference"))),
    Curve("Importance ratio", "", (("actor/ratio_mean", "mean"), ("actor/ratio_max", "greatest"))),
    Curve(
        "Clipped tokens",
        "share",
        (
            ("actor/clip_fraction_low", "lower bound"),
            ("actor/clip_fraction_high", "upper bound"),
            ("actor/dual_clip_fraction", "dual clip"),
        ),
    ),
    Curve("Gradient norm", "", (("actor/grad_norm", "before clipping"),)),
    Curve("Learning rate", "", (("actor/lr", "last optimizer step"),)),
    Curve(
        "Actors against engines",
        "nats",
        (("parity/mean_abs_logprob_diff", "mean |difference of log-probabilities|"),),
        "far below `weight_sync.max_mean_logprob_diff` when all is well",
    ),
    Curve(
        "Actors against engines, by cause",
        "nats",
        (("mismatch/mean", "all of it"), ("mismatch/*_mean", "")),
        "what switching one cause off takes away; `kernels` is what is left, `staleness` comes on top",
    ),
    Curve("Staleness", "updates", (("batch/staleness_mean", "mean"), ("batch/staleness_max", "greatest"))),
    Curve(
        "Tokens per second",
        "tokens/s",
        (("perf/generation_tokens_per_s", "generation"), ("perf/update_tokens_per_s", "update")),
    ),
    Curve(
        "Goodput",
        "share",
        (("perf/goodput", "of the step"), ("ledger/goodput", "of the run")),
        "tokens trained on, of those generated",
        top=1.0,
    ),
)
PATTERNS = (*[name for curve in CURVES for name, _ in curve.metrics], "perf/*_s")


class Columns:
    """Maps the steps of a run (in order, at least one) to the columns of its charts."""

    def __init__(self, steps: Sequence[int]) -> None:
        size = -(-len(steps) // COLUMNS)
        parts = [steps[start : start + size] for start in range(0, len(steps), size)]
        self.bounds = [(part[0], part[-1]) for part in parts]
        self._first = [first for first, _ in self.bounds]

    def of(self, step: int) -> int:
        return max(0, bisect_right(self._first, step) - 1)

    def means(self, series: Series) -> list[float | None]:
        parts: list[list[float]] = [[] for _ in self.bounds]
        for step, value in series.items():
            parts[self.of(step)].append(value)
        return [_short(statistics.fmean(part)) if part else None for part in parts]

    def counts(self, found: Iterable[tuple[int, int, int]], bins: int) -> list[list[int]]:
        """Returns per column the count in each bin. found: (step, bin, count)."""
        counts = [[0] * bins for _ in self.bounds]
        for step, place, number in found:
            counts[self.of(step)][min(place, bins - 1)] += number
        return counts


def write(store: Reader, path: Path) -> str:
    """Writes the page and returns a line about it. Raises ValueError without a step, or if it cannot be written."""
    run = figures(store)
    found = data(store, run, findings(run))
    text = page(found)
    try:
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise ValueError(f"`--html` ({path}) cannot be written ({error}); give a file in an existing folder") from error
    shown = f"{len(found['groups'])} groups, {len(found['findings'])} things to look at"
    return f"{path}: {found['run']['steps']} steps, {shown}, {len(text) / 1e6:.1f} MB"


def page(found: Mapping[str, Any]) -> str:
    """Returns the page in ASCII. found: from `data`; any text in it stays data."""
    # Only "<" can end a script element; JSON allows it as an escape wherever it occurs.
    inside = json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    style, script = _asset("page.css"), "\n".join(map(_asset, SCRIPTS))
    parts = {"STYLE_HASH": _hash(style), "SCRIPT_HASH": _hash(script), "STYLE": style, "SCRIPT": script, "DATA": inside}
    text = _asset("page.html")
    for name, value in parts.items():  # the data last: it is not scanned for placeholders
        before, _, after = text.partition(f"[[{name}]]")
        text = before + value + after
    return text


def _asset(name: str) -> str:
    return files("dapo.inspect").joinpath("assets", name).read_text(encoding="ascii")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def data(store: Reader, run: Figures, looks: Sequence[Finding]) -> dict[str, Any]:
    """Returns all that the page shows. Raises ValueError for a run without a step."""
    rows = store.steps()
    if not rows:
        raise ValueError(f"{store.path} has no step yet; wait for the first one to end")
    steps = [row["step"] for row in rows]
    ended = [{**row, "trained": row["trained"] - (row["alike"] or 0)} for row in rows]  # each group in one part only
    metrics = store.metrics(*PATTERNS, "eval/*")
    columns = Columns(steps)
    return {
        "run": _run(store, rows, metrics),
        "findings": [
            {"rule": look.rule, "what": plain(look.what), "changes": list(map(str, look.changes))} for look in looks
        ],
        "columns": columns.bounds,
        "curves": _curves(columns, metrics),
        "evaluations": _evaluations(metrics),
        "fates": _stack(
            columns,
            {fate.words: {row["step"]: (row[fate] or 0) / row["drawn"] for row in ended} for fate in Fate},
        ),
        "seconds": _stack(columns, {phase: metrics.get(f"perf/{phase}_s", {}) for phase in PHASES}),
        "wall": columns.means(metrics.get("perf/step_s", {})),
        "lengths": _lengths(store, columns, rows),
        "pass_rates": {"bins": RATE_BINS, "counts": columns.counts(store.pass_rates(RATE_BINS), RATE_BINS + 2)},
        "groups": browser(store, steps),
        "events": [
            [row["step"], row["at"], plain(row["kind"]), plain(row["message"])]
            for row in reversed(store.events(EVENTS))
        ],
        "config": [[plain(key), plain(value)] for key, value in _flat(run.config)],
    }


def _run(store: Reader, rows: Sequence[Row], metrics: Mapping[str, Series]) -> dict[str, Any]:
    starts = store.starts()
    config = dict(_flat(starts[-1]["config"])) if starts else {}
    seconds = [row["seconds"] for row in rows if row["seconds"] is not None]
    shown = [["steps", f"{rows[-1]['step']}", f"of {config.get('trainer.total_steps', 'an unknown number')}"]]
    for name, title in (("rollout/accuracy", "accuracy of drawn groups"), ("eval/accuracy", "held-out accuracy")):
        if values := [metrics[name][step] for step in sorted(metrics.get(name, {}))]:
            shown.append([title, f"{values[-1]:.3f}", f"at first {values[0]:.3f}, at best {max(values):.3f}"])
    if seconds:
        median = f"median step {statistics.median(seconds):.3g} s, slowest {max(seconds):.3g} s"
        shown.append(["time in steps", duration(sum(seconds)), median])
    tokens, trained, lost = (sum(row[name] for row in rows) for name in ("tokens", "trained_tokens", "lost_tokens"))
    share = trained / (tokens + lost) if tokens + lost else 0.0
    shown.append(["tokens generated", short(tokens + lost), f"{share:.0%} trained on"])
    kinds = f"warnings {store.count('warning')}, checkpoints {store.count('save')}"
    shown.append(["starts", str(len(starts)), kinds])
    return {
        "name": plain(store.path.absolute().parent.name),
        "model": plain(config.get("model.path", "")),
        "host": plain(starts[-1]["host"]) if starts else "",
        "ended": starts[-1]["ended"] if starts else None,
        "at": rows[-1]["at"],
        "steps": len(rows),
        "figures": shown,
    }


def _curves(columns: Columns, metrics: Mapping[str, Series]) -> list[dict[str, Any]]:
    found = []
    for curve in CURVES:
        lines = [
            {"label": plain(label), "values": columns.means(metrics[name])} for name, label in curve.lines(metrics)
        ]
        if lines:
            found.append(
                {"title": curve.title, "unit": curve.unit, "note": curve.note, "top": curve.top, "lines": lines}
            )
    return found


def _evaluations(metrics: Mapping[str, Series]) -> list[dict[str, Any]]:
    found = []
    names = sorted(name for name in metrics if name.startswith("eval/") and name.endswith("/accuracy"))
    for name in names:
        low, high = (metrics.get(f"{name}_{end}", {}) for end in ("low", "high"))
        if name == "eval/accuracy" and not low and len(names) > 1:
            continue  # the mean of several sets, each of which is here
        points = [
            [step, *[None if value is None else _short(value) for value in (value, low.get(step), high.get(step))]]
            for step, value in sorted(metrics[name].items())
        ]
        label = name.removeprefix("eval/").removesuffix("accuracy").rstrip("/")
        found.append({"label": plain(label) or "held out", "points": points[:: -(-len(points) // COLUMNS)]})
    return found


def _stack(columns: Columns, series: Mapping[str, Series]) -> list[dict[str, Any]]:
    lines = [{"label": name, "values": columns.means(values)} for name, values in series.items()]
    return [line for line in lines if any(line["values"])]


def _lengths(store: Reader, columns: Columns, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the histograms of the lengths. width: tokens of a bin. every: one draw in so many is counted."""
    width = max(1, -(-(max(row["longest"] or 0 for row in rows) + 1) // LENGTH_BINS))
    every = -(-store.responses() // MAX_SAMPLED) or 1
    return {"width": width, "every": every, "counts": columns.counts(store.lengths(width, every), LENGTH_BINS)}


def _flat(config: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{above}{name}.")
        else:
            found.append((f"{above}{name}", value if isinstance(value, str) else json.dumps(value)))
    return found


def _short(value: float) -> float:
    return float(f"{value:.5g}")
