"""What every role did within a step, in the terminal and on the page."""

import re
from pathlib import Path

import pytest

from dapo.inspect.__main__ import main
from dapo.store.reader import Reader
from tests.inspect.test_page import Parsed
from tests.support.report.shown_run import make_run


def test_the_terminal_and_the_page_show_the_slowest_step_first(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, 60, n=2, text=lambda draw, sample: "short")
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
    main([str(run), "timeline", "3"])
    assert capsys.readouterr().out.startswith("step 3: ")
    main([str(run), "--html", str(run / "page.html")])
    data = Parsed((run / "page.html").read_text()).data
    found = [each["step"] for each in data["timelines"]]
    assert found[:20] == slowest[:20] and {1, 60} < set(found) and len(found) == len(set(found)) <= 40
    lanes = data["timelines"][0]["lanes"]
    assert lanes[-1]["role"] == "driver waits for"
    assert {part[2] for lane in lanes for part in lane["parts"]} < set(range(len(data["kinds"])))
