"""The page that shows runs, and its data. The page is one file: `assets/` and the data as JSON, of bounded size, which
loads nothing (`--html`), or no data, which it asks `serve.py` for. Model output is inserted as text only, and no other
script may run."""

import base64
import hashlib
import json
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from dapo.algorithm.fate import Fate
from dapo.ground.console import plain
from dapo.ground.table import duration, short
from dapo.report.store.reader import PHASES, Reader
from dapo.tools.inspect.findings import figures, findings, verdict
from dapo.tools.inspect.groups import MAX_BYTES, browser

COLUMNS = 400  # of a chart; with more steps, each is the mean of several
LENGTH_BINS = 100
RATES = ("none right", "below a quarter", "below half", "below three quarters", "below all", "all right")
MAX_SAMPLED = 200_000  # responses in the histogram of lengths; with more, one draw in so many is used
EVENTS = 200  # newest
SCRIPTS = ("uPlot.js", "elements.js", "charts.js", "groups.js", "main.js")  # in this order
LIVE = "live.js"  # the last script of a page that is served

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


ACCURACY = Curve("Accuracy", "share", (("rollout/accuracy", "drawn groups"),), top=1.0)
LENGTH = Curve(
    "Response length",
    "tokens",
    (("rollout/response_length_mean", "mean"), ("rollout/response_length_max", "longest")),
    "half and nine of ten answers are no longer than their lines",
)
CURVES = (
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
        "Mismatch by cause",
        "nats",
        (("mismatch/mean", "all of it"), ("mismatch/*_mean", "")),
        "actors against engines: what switching one cause off takes away; `kernels` is the rest, `staleness` is added",
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
PATTERNS = (*[name for curve in (ACCURACY, LENGTH, *CURVES) for name, _ in curve.metrics], "perf/*_s", "eval/*")


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


def write(stores: Sequence[Reader], path: Path) -> str:
    """Writes the page and returns a line about it. Raises ValueError for a run without a step, or if it cannot be
    written."""
    found = [data(store, name, MAX_BYTES // len(stores)) for store, name in zip(stores, names(stores), strict=True)]
    text = page(found)
    try:
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise ValueError(f"`--html` ({path}) cannot be written ({error}); give a file in an existing folder") from error
    runs = "; ".join(f"{one['run']['steps']} steps, {one['verdict'][1]}" for one in found)
    return f"{path}: {runs}, {len(text) / 1e6:.1f} MB"


def names(stores: Sequence[Reader]) -> list[str]:
    """Returns the names of the runs' folders, with the folder above where several have the same."""
    folders = [store.path.absolute().parent for store in stores]
    alike = Counter(folder.name for folder in folders)
    return [folder.name if alike[folder.name] == 1 else f"{folder.parent.name}/{folder.name}" for folder in folders]


def page(found: Sequence[Mapping[str, Any]], live: bool = False) -> str:
    """Returns the page in ASCII. found: from `data`, of each run; any text in it stays data. live: it asks its server
    for the data."""
    # Only "<" can end a script element; JSON allows it as an escape wherever it occurs.
    inside = json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    style = _asset("uPlot.css") + _asset("page.css")
    script = "\n".join(map(_asset, (*SCRIPTS, *([LIVE] if live else []))))
    parts = {
        "STYLE_HASH": _hash(style),
        "SCRIPT_HASH": _hash(script),
        "CONNECT": "'self'" if live else "'none'",
        "STYLE": style,
        "SCRIPT": script,
        "DATA": inside,
    }
    text = _asset("page.html")
    for name, value in parts.items():  # the data last: it is not scanned for placeholders
        before, _, after = text.partition(f"[[{name}]]")
        text = before + value + after
    return text


def _asset(name: str) -> str:
    return files("dapo.tools.inspect").joinpath("assets", name).read_text(encoding="ascii")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def data(store: Reader, name: str, group_bytes: int) -> dict[str, Any]:
    """Returns all that the page shows of a run. group_bytes: of the groups with answers; 0: none, the page asks for
    them. Raises ValueError for a run without a step."""
    rows = store.steps()
    if not rows:
        raise ValueError(f"{store.path} has no step yet; wait for the first one to end")
    steps = [row["step"] for row in rows]
    metrics = store.metrics(*PATTERNS)
    run = figures(store)
    looks = findings(run)
    columns = Columns(steps)
    return {
        "run": _run(store, name, rows, metrics),
        "verdict": verdict(run, looks),
        "findings": [
            [look.severity, look.rule, plain(look.what), [plain(str(change)) for change in look.changes]]
            for look in looks
        ],
        "columns": columns.bounds,
        "charts": _charts(store, columns, metrics, rows),
        "steps": steps,
        "groups": browser(store, steps, group_bytes) if group_bytes else [],
        "events": [
            [row["step"], row["at"], plain(row["kind"]), plain(row["message"])]
            for row in reversed(store.events(EVENTS))
        ],
        "config": [[plain(key), plain(value)] for key, value in _flat(run.config)],
    }


def _run(store: Reader, name: str, rows: Sequence[Row], metrics: Mapping[str, Series]) -> dict[str, Any]:
    starts = store.starts()
    config = dict(_flat(starts[-1]["config"])) if starts else {}
    seconds = [row["seconds"] for row in rows if row["seconds"] is not None]
    shown = [["steps", f"{rows[-1]['step']}", f"of {config.get('trainer.total_steps', 'an unknown number')}"]]
    for metric, title in (("rollout/accuracy", "accuracy of drawn groups"), ("eval/accuracy", "held-out accuracy")):
        if values := [metrics[metric][step] for step in sorted(metrics.get(metric, {}))]:
            shown.append([title, f"{values[-1]:.3f}", f"at first {values[0]:.3f}, at best {max(values):.3f}"])
    if seconds:
        median = f"median step {statistics.median(seconds):.3g} s, slowest {max(seconds):.3g} s"
        shown.append(["time in steps", duration(sum(seconds)), median])
    tokens, trained, lost = (sum(row[part] for row in rows) for part in ("tokens", "trained_tokens", "lost_tokens"))
    share = trained / (tokens + lost) if tokens + lost else 0.0
    shown.append(["tokens generated", short(tokens + lost), f"{share:.0%} trained on"])
    kinds = f"warnings {store.count('warning')}, checkpoints {store.count('save')}"
    shown.append(["starts", str(len(starts)), kinds])
    return {
        "name": plain(name),
        "model": plain(config.get("model.path", "")),
        "host": plain(starts[-1]["host"]) if starts else "",
        "ended": starts[-1]["ended"] if starts else None,
        "at": rows[-1]["at"],
        "steps": len(rows),
        "figures": shown,
    }


def _charts(
    store: Reader, columns: Columns, metrics: Mapping[str, Series], rows: Sequence[Row]
) -> list[dict[str, Any]]:
    """Returns the charts in the order of the page; those without a line are left out."""
    ended = [{**row, "trained": row["trained"] - (row["alike"] or 0)} for row in rows]  # each group in one part only
    fates = {fate.words: {row["step"]: (row[fate] or 0) / row["drawn"] for row in ended} for fate in Fate}
    seconds = _lines(columns, {phase: metrics.get(f"perf/{phase}_s", {}) for phase in PHASES})
    if wall := _lines(columns, {"whole step": metrics.get("perf/step_s", {})}):
        seconds.append({**wall[0], "over": True})
    lengths, every = _quantiles(store, columns, rows)
    accuracy, length, *curves = (_curve(columns, metrics, curve) for curve in (ACCURACY, LENGTH, *CURVES))
    length["lines"] += lengths
    length["note"] += f" (of one draw in {every})" if every > 1 else ""
    charts = [
        {**accuracy, "large": True},
        {
            "title": "Held-out accuracy",
            "unit": "share",
            "note": "with 95 % intervals over problems",
            "top": 1.0,
            "large": True,
            "lines": _evaluations(metrics),
        },
        {
            "title": "What became of the groups",
            "unit": "share",
            "note": "only groups of mixed accuracy teach something",
            "top": 1.0,
            "stacked": True,
            "large": True,
            "lines": _lines(columns, fates),
        },
        {
            "title": "Pass rates",
            "unit": "share",
            "note": "how many groups have which share of right answers",
            "top": 1.0,
            "stacked": True,
            "lines": _rates(store, columns),
        },
        length,
        {
            "title": "Where the seconds went",
            "unit": "s",
            "note": "phases overlap (answers are scored while others are generated): together they may exceed the step",
            "stacked": True,
            "lines": seconds,
        },
        *curves,
    ]
    return [chart for chart in charts if chart["lines"]]


def _curve(columns: Columns, metrics: Mapping[str, Series], curve: Curve) -> dict[str, Any]:
    lines = [{"label": plain(label), "values": columns.means(metrics[name])} for name, label in curve.lines(metrics)]
    return {"title": curve.title, "unit": curve.unit, "note": curve.note, "top": curve.top, "lines": lines}


def _lines(columns: Columns, series: Mapping[str, Series]) -> list[dict[str, Any]]:
    lines = [{"label": name, "values": columns.means(values)} for name, values in series.items()]
    return [line for line in lines if any(line["values"])]


def _evaluations(metrics: Mapping[str, Series]) -> list[dict[str, Any]]:
    found = []
    names = sorted(name for name in metrics if name.startswith("eval/") and name.endswith("/accuracy"))
    for name in names:
        low, high = (metrics.get(f"{name}_{end}", {}) for end in ("low", "high"))
        if name == "eval/accuracy" and not low and len(names) > 1:
            continue  # the mean of several sets, each of which is here
        steps = sorted(metrics[name])
        steps = steps[:: -(-len(steps) // COLUMNS)]
        values, lows, highs = (
            [None if (value := each.get(step)) is None else _short(value) for step in steps]
            for each in (metrics[name], low, high)
        )
        label = name.removeprefix("eval/").removesuffix("accuracy").rstrip("/")
        line = {"label": plain(label) or "held out", "x": steps, "values": values}
        found.append(line | ({"low": lows, "high": highs} if any(lows) else {}))
    return found


def _rates(store: Reader, columns: Columns) -> list[dict[str, Any]]:
    counts = columns.counts(store.pass_rates(len(RATES) - 2), len(RATES))
    shares = [[_short(count / (sum(column) or 1)) for count in column] for column in counts]
    return [{"label": label, "values": values} for label, *values in zip(RATES, *shares, strict=True) if any(values)]


def _quantiles(store: Reader, columns: Columns, rows: Sequence[Row]) -> tuple[list[dict[str, Any]], int]:
    """Returns lines of the lengths, and the number of draws of which one is used."""
    width = max(1, -(-(max(row["longest"] or 0 for row in rows) + 1) // LENGTH_BINS))
    every = -(-store.responses() // MAX_SAMPLED) or 1
    counts = [list(accumulate(column)) for column in columns.counts(store.lengths(width, every), LENGTH_BINS)]
    return [
        {
            "label": label,
            "values": [bisect_left(sums, part * sums[-1]) * width + width - 1 if sums[-1] else None for sums in counts],
        }
        for label, part in (("half", 0.5), ("nine of ten", 0.9))
    ], every


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
