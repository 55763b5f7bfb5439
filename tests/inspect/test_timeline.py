"""What every role did within a step: rows against a picture by hand, in the terminal and on the page."""

import json
import re
import sqlite3
from contextlib import closing
from importlib.resources import files
from pathlib import Path

import pytest

from dapo.inspect.__main__ import main
from dapo.inspect.timeline import KINDS, Lane, drawn, shown, timeline
from dapo.store.reader import PHASES, Reader
from dapo.store.schema import GROWS
from tests.inspect.test_page import Parsed
from tests.support.report.shown_run import make_run


def span(lane: str, began: float, ended: float, level: float = 1.0) -> dict:
    return {"lane": lane, "began": began, "ended": ended, "level": level}


STEP = [
    span("save", -4, -2),
    span("generation", 0, 10),
    span("reward", 5, 12),
    span("update", 11, 16),  # while answers are generated that are kept for the next step
    span("generation", 14, 18),
    span("sync", 16, 17),
    span("aside", 2, 9),
    span("engine 10", 0, 5, 1.0),
    span("engine 2", 0, 5, 4.0),
    span("engine 2", 5, 10, 2.0),
    span("reward workers", 5, 12, 3.0),
    span("of a later version", 0, 1),
]


def by_role(step: list[dict], seconds: float | None = 20.0) -> dict[str, Lane]:
    found = timeline(7, step, seconds)
    assert found is not None and (found.began, found.ended) == (-4, 20)
    return {lane.role: lane for lane in found.lanes}


def test_each_role_has_a_row_and_the_driver_is_told_whole() -> None:
    lanes = by_role(STEP)
    assert list(lanes) == ["engine 2", "engine 10", "reward workers", "ranks", "evaluation", "driver waits for"]
    assert lanes["ranks"].parts == ((-4, -2, "save", 1), (11, 16, "update", 1), (16, 17, "sync", 1))
    assert [part[:3] for part in lanes["driver waits for"].parts] == [
        (-4, -2, "save"),
        (-2, 0, "driver"),
        (0, 10, "generation"),
        (10, 11, "reward"),
        (11, 16, "update"),
        (16, 17, "sync"),
        (17, 18, "generation"),
        (18, 20, "driver"),
    ]
    assert lanes["engine 2"].about(-4, 20) == "1.25 requests in the engine, at most 4"
    assert lanes["ranks"].about(-4, 20) == "update 5 s, checkpoint 2 s, weight sync 1 s"
    assert timeline(7, [], 20.0) is None
    assert "engine \N{REPLACEMENT CHARACTER}[2J<b>" in by_role([*STEP, span("engine \x1b[2J<b>", 0, 1)])


@pytest.mark.parametrize("phase", PHASES)
def test_whatever_a_step_counts_has_a_letter_and_a_color(phase: str) -> None:
    """Also where engines fall asleep on the GPUs that the actors take then."""
    [lane] = [lane for role, lane in by_role([STEP[0], span(phase, 0, 20)]).items() if role == "driver waits for"]
    assert lane.parts[-1][1:3] == (20, phase)
    colors = re.search(r"const COLORS = (\[.*\]);", files("dapo.inspect").joinpath("assets/timeline.js").read_text())
    css = files("dapo.inspect").joinpath("assets/page.css").read_text()
    named = json.loads(colors[1]) if colors else []
    assert len(named) == len(KINDS) and all(f".{name} {{" in css for name in named)


def test_of_many_engines_the_sum_and_the_ends_are_told() -> None:
    busy = [span(f"engine {number}", at, at + 5, number + 1.0) for number in range(9) for at in (0, 5)]
    lanes = by_role([*STEP[:1], *busy])
    assert list(lanes)[:3] == ["9 engines", "engine 8", "engine 0"]
    assert lanes["9 engines"].parts == ((0, 5, "requests", 45), (5, 10, "requests", 45))


def test_a_row_in_characters() -> None:
    lanes = by_role(STEP)
    assert drawn(lanes["driver waits for"], -4, 20, 24) == "ssdd" + 10 * "g" + "ruuuuuwgdd"
    assert drawn(lanes["driver waits for"], -4, 20, 4) == "sguu", "what takes most of each"
    assert drawn(lanes["ranks"], -4, 20, 24) == "ss" + 13 * "·" + "uuuuuw···"
    assert drawn(lanes["engine 2"], -4, 20, 12) == "··██▆▄▄·····"
    assert drawn(lanes["reward workers"], -4, 20, 3) == "·▇·"


def test_what_the_page_draws() -> None:
    found = timeline(7, STEP, 20.0)
    assert found is not None
    page = shown(found)
    assert (page["step"], page["began"], page["ended"]) == (7, -4, 20)
    assert page["lanes"][0]["parts"] == [[0, 5, 0, 1.0], [5, 10, 0, 0.5]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), 60, n=2, text=lambda draw, sample: "short")


def test_the_terminal_and_the_page_show_the_slowest_step_first(
    run: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    main([str(run), "timeline"])
    out = capsys.readouterr().out
    with Reader(run) as store:
        seconds = {row["step"]: row["seconds"] for row in store.steps()}
    slowest = sorted(seconds, key=lambda step: -seconds[step])
    assert out.startswith(f"step {slowest[0]}: {seconds[slowest[0]]:.3g} s, and 3 s between it and the step before\n")
    rows = {line[:17].strip(): line for line in out.splitlines()}
    assert re.search(r"▁·+ +[\d.]+ requests in the engine, at most 2\d", rows["engine 0"])
    assert re.search(r"sg+u+w .*generation \d+ s, update \d\d.*s, weight sync 4 s", rows["driver waits for"])
    assert "g generation, r scoring, u update" in out
    main([str(run), "timeline", "3"])
    assert capsys.readouterr().out.startswith("step 3: ")
    main([str(run), "--html", str(run / "page.html")])
    capsys.readouterr()
    data = Parsed((run / "page.html").read_text()).data
    found = [each["step"] for each in data["timelines"]]
    assert found[:20] == slowest[:20] and {1, 60} < set(found) and len(found) == len(set(found)) <= 40
    assert [lane["role"] for lane in data["timelines"][0]["lanes"]][-1] == "driver waits for"
    assert {part[2] for lane in data["timelines"][0]["lanes"] for part in lane["parts"]} < set(
        range(len(data["kinds"]))
    )


def test_a_run_of_an_older_dapo_is_shown_without(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    old = tmp_path / "samples.sqlite"
    with closing(sqlite3.connect(run / "samples.sqlite")) as new, closing(sqlite3.connect(old)) as copy:
        new.backup(copy)
        copy.execute("DROP TABLE spans")
        copy.execute(f"PRAGMA user_version = {GROWS[-1]}")
        copy.commit()
    with pytest.raises(SystemExit, match="has no timeline of step 3: an older dapo has written it"):
        main([str(tmp_path), "timeline", "3"])
    with pytest.raises(SystemExit, match="has no step 61"):
        main([str(tmp_path), "timeline", "61"])
    main([str(tmp_path), "--html", str(tmp_path / "page.html")])
    assert capsys.readouterr().out.startswith(f"{tmp_path}/page.html: 60 steps")
    assert Parsed((tmp_path / "page.html").read_text()).data["timelines"] == []
