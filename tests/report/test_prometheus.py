"""Gauges of Ray for every number, and a dashboard that asks for none that is not there."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from ray.util.metrics import Gauge

from dapo.config.compose import compose
from dapo.report.sinks.choice import sinks_of
from dapo.report.sinks.prometheus import problem, prometheus_name
from tests.support.report.reference import NAMES, PLACEHOLDER

DASHBOARD = json.loads((Path(__file__).resolve().parents[2] / "launch/grafana.json").read_text(encoding="utf-8"))


class Recorded(Gauge):
    """A gauge of Ray that also keeps what it is set to; without a cluster nobody takes it."""

    values: dict[tuple[str, str], float] = {}  # (name, run) -> value
    made = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        assert not self._discard_metric
        Recorded.made += 1

    def _record(self, value, tags=None):
        super()._record(value, tags)
        self.values[self.info["name"], self._get_final_tags(tags)["run"]] = value


def test_each_number_has_a_gauge_with_its_newest_value(tmp_path: Path) -> None:
    cfg = compose(["+experiment=dapo_tiny", "logging.prometheus=true", "logging.tensorboard=false"])
    assert sinks_of(cfg, tmp_path) == [], "there is no Ray"
    [sink] = sinks_of(cfg, tmp_path, Recorded)
    sink.begin(0)
    sink.scalars(1, {"actor/loss": 0.5, "perf/step_s": 2.0})
    sink.histogram(1, "rollout/lengths", [1.0])
    sink.text(1, "sample/0", "x")
    sink.scalars(2, {"actor/loss": math.nan, "reward/my function": 1.0, "eval/pass@4": 0.25})
    sink.close()
    sink.begin(2)
    sink.scalars(3, {"perf/step_s": 3.0})
    run = tmp_path.name
    found = {name: value for (name, of), value in Recorded.values.items() if of == run}
    assert found.pop("dapo_actor_loss") != 0.5
    assert found == {"dapo_step": 3, "dapo_perf_step_s": 3.0, "dapo_reward_my_function": 1.0, "dapo_eval_pass_4": 0.25}
    assert Recorded.made == 5, "one for each name, however often it is set"


def test_no_two_metrics_share_a_gauge() -> None:
    assert len({prometheus_name(name) for name in NAMES}) == len(NAMES)


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    known = "|".join(
        "".join(r"(?:\w|\[0-9\]\+)+" if PLACEHOLDER.fullmatch(part) else prometheus_name(part)[5:] for part in parts)
        for parts in (re.split(r"(\{\w+\})", name) for name in [*NAMES, "step"])
    )
    targets = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    asked = [found for text in targets for found in re.findall(r"ray_dapo_((?:\w|\[0-9\]\+|\(\.\+_\)\?)+)", text)]
    assert len(asked) == len(targets) > 40
    asked = [name.replace("(.+_)?", part) for name in asked for part in ("", "set_")]
    assert [name for name in asked if not re.fullmatch(known, name)] == []
    assert all('run=~"$run"' in text for text in targets)
    boxes = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    covered = [
        (x, y)
        for box in boxes
        for x in range(box["x"], box["x"] + box["w"])
        for y in range(box["y"], box["y"] + box["h"])
    ]
    assert len(covered) == len(set(covered)) and max(x for x, _ in covered) < 24, "panels do not lie on each other"


def test_the_dashboard_shows_every_held_out_set_by_name() -> None:
    [target] = [one for panel in DASHBOARD["panels"] for one in panel.get("targets", []) if "dapo_eval_" in one["expr"]]
    pattern = re.search('__name__=~"(.*?)"', target["expr"])
    assert pattern and target["legendFormat"] == "{{run}} {{__name__}}"
    shown = ("eval/accuracy", "eval/aime/accuracy", "eval/aime/AIME 2024/accuracy")
    others = ("eval/accuracy_low", "eval/aime/accuracy_high", "eval/aime/maj@4", "rollout/accuracy")
    assert [name for name in (*shown, *others) if re.fullmatch(pattern[1], f"ray_{prometheus_name(name)}")] == [*shown]


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem(False) == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "lacks opencensus, opentelemetry.exporter.prometheus: pip install 'ray[default]'" in problem(True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert problem(True) == ""
