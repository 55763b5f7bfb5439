"""The picture of runs: what is drawn from the metrics, and the errors of its command line."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dapo.plot import kinds_of, load_runs, main, series


def write_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_series_takes_the_last_record_of_a_step_and_no_nan() -> None:
    records = [
        {"step": 2, "a": 0.5},
        {"step": 0, "a": 0.1},
        {"step": 1, "b": 1.0},
        {"step": 3, "a": math.nan},
        {"step": 2, "a": 0.6},
    ]
    assert series(records, "a") == ([0, 2], [0.1, 0.6])
    assert series(records, "c") == ([], [])


def test_labels_tell_runs_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, [{"step": 1}]) for name in ("a/seed0", "b/seed0", "b/seed1")]
    assert list(load_runs(folders)) == ["a/seed0", "b/seed0", "seed1"]


def test_a_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    step = {"rollout/accuracy": 0.5, "rollout/response_length_mean": 30.0, "actor/entropy": None}
    records = [{"step": 0, "eval/accuracy": 0.4}, *({"step": i, **step} for i in (1, 2, 3))]
    runs = [write_run(tmp_path / name, records) for name in ("one", "two")]
    pictures = {}
    for number, given in (("one", runs[:1]), ("two", runs), ("axes", runs)):
        out = tmp_path / f"{number}.png"
        more = ["--against", "step", "seconds"] if number == "axes" else []
        main([*map(str, given), "--out", str(out), "--title", "sums", *more])
        pictures[number] = out.read_bytes()
        assert capsys.readouterr().out == f"{out}\n"
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())
    assert len(set(pictures.values())) == 3


@pytest.mark.parametrize(
    ("labels", "kinds"),
    [
        pytest.param(["grpo-seed0", "grpo-seed1", "dapo"], ["grpo", "grpo", "dapo"], id="seeds"),
        pytest.param(["a/seed0", "b/seed0"], ["a/seed0", "b/seed0"], id="one-each"),
        pytest.param(["seed0", "seed1"], ["seed0", "seed1"], id="nothing-but-seeds"),
        pytest.param(["one"], ["one"], id="one"),
    ],
)
def test_runs_that_differ_in_their_seed_are_of_one_kind(labels: list[str], kinds: list[str]) -> None:
    assert kinds_of(labels) == kinds


@pytest.mark.parametrize(
    ("run", "out", "message"),
    [
        pytest.param("nothing", "a.png", "nothing. holds no metrics.jsonl", id="no-run"),
        pytest.param("empty", "a.png", "metrics.jsonl is empty", id="no-step"),
        pytest.param("good", "nowhere/a.png", "nowhere/a.png cannot be written", id="no-folder"),
        pytest.param("good", "a.doc", "a.doc cannot be written", id="unknown-format"),
    ],
)
def test_errors_of_the_command(run: str, out: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "good", [{"step": 1, "rollout/accuracy": 0.5}])
    write_run(tmp_path / "empty", [])
    with pytest.raises(SystemExit, match=message):
        main([str(tmp_path / run), "--out", str(tmp_path / out)])
