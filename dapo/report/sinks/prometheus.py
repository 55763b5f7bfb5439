"""Offers the newest numbers to Prometheus, on the endpoint that Ray has on every node.

In: scalars of a step. Out: gauges `ray_dapo_NAME` with the label `run`, NAME being the metric's with `_` for whatever
Prometheus does not take in a name. launch/grafana.json shows them. Histograms and texts have no place there.
"""

import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dapo.report.sinks.sink import Sink

NEEDED = ("opencensus", "opentelemetry.exporter.prometheus")  # without them Ray has no endpoint, and does not say so


class Prometheus(Sink):
    """Sets gauges; a resumed run overwrites those of later steps. Those of a run that ended keep their values until its
    process does."""

    def __init__(self, output_dir: Path, gauge: Callable[..., Any]) -> None:
        """Makes no gauge yet. output_dir: its last part names the run. gauge: `ray.util.metrics.Gauge`."""
        self.name = "Ray's endpoint for Prometheus"
        self._run = output_dir.name
        self._make = gauge
        self._gauges: dict[str, Any] = {}

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {"step": float(step), **values}.items():
            if name not in self._gauges:
                gauge = self._make(prometheus_name(name), name, tag_keys=("run",))
                self._gauges[name] = gauge.set_default_tags({"run": self._run})
            self._gauges[name].set(value)


def prometheus_name(name: str) -> str:
    """Returns a metric's name as it is given to Ray, which puts `ray_` before it.

    >>> prometheus_name("eval/pass@4_low")
    'dapo_eval_pass_4_low'
    """
    return f"dapo_{re.sub('[^a-zA-Z0-9_]', '_', name)}"


def problem(wanted: bool) -> str:
    """Returns what keeps `logging.prometheus` from working, empty if nothing does."""
    missing = [name for name in NEEDED if wanted and not _installed(name)]
    if not missing:
        return ""
    return (
        f"`logging.prometheus` (true) needs Ray's dashboard agent, which lacks {', '.join(missing)}: "
        "pip install 'ray[default]' on every node"
    )


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that it is part of
        return False
