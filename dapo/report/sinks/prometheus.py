"""Exports the newest scalars to Prometheus, on the metrics endpoint that Ray has on every node. Gauges are named
`ray_dapo_NAME`, where NAME is the metric's with invalid characters replaced by `_`, with the label `run`.
launch/grafana.json shows them. Histograms and texts are not exported."""

import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dapo.report.sinks.sink import Sink

NEEDED = ("opencensus", "opentelemetry.exporter.prometheus")  # without them Ray has no endpoint, and reports no error


class Prometheus(Sink):
    """Sets gauges. A resumed run overwrites later values; after a run ends, gauges stay until its process ends."""

    def __init__(self, output_dir: Path, gauge: Callable[..., Any]) -> None:
        """output_dir: its last part names the run. gauge: `ray.util.metrics.Gauge`."""
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
    """Returns a metric's name for Ray, which adds the prefix `ray_`.

    >>> prometheus_name("eval/pass@4_low")
    'dapo_eval_pass_4_low'
    """
    return f"dapo_{re.sub('[^a-zA-Z0-9_]', '_', name)}"


def problem(wanted: bool) -> str:
    """Returns what is wrong with `logging.prometheus`; empty if nothing is."""
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
    except ModuleNotFoundError:  # its parent package is missing
        return False
