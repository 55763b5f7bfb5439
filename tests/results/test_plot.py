"""The picture of runs: what is drawn from the metrics, and the errors of its command line."""

import math

import pytest

from dapo.results.plot import kinds_of, series
from dapo.results.runs import read_runs
from dapo.tools.plot import main
from tests.support.results.run_files import write_run


def test_a_series_takes_the_last_record_of_a_step_and_no_nan():
    found = [(2, 0.5), (0, 0.1), (3, math.nan), (2, 0.6)]
    records = [{"step": step, "a": value} for step, value in found] + [{"step": 1, "b": 1.0}]
    assert series(records, "a") == ([0, 2], [0.1, 0.6])
    assert series(records, "c") == ([], [])


def test_labels_tell_runs_apart(tmp_path):
    folders = [write_run(tmp_path / name, [{"step": 1}]) for name in ("a/seed0", "b/seed0", "b/seed1")]
    assert [run.name for run in read_runs(folders)] == ["a/seed0", "b/seed0", "seed1"]


def test_one_run_has_its_name_and_model_above_and_one_step_has_a_marker(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    run = write_run(tmp_path / "short", [{"step": 1, "rollout/accuracy": 0.5}])
    main([str(run), "--out", str(tmp_path / "a.png")])
    main([str(run), str(run), "--out", str(tmp_path / "b.png")])
    model = read_runs([run])[0].config["model"]["path"]
    assert [figure.get_suptitle() for figure in kept] == [f"short: {model}", ""]
    assert [line.get_marker() for line in kept[0].axes[1].lines] == ["o"]


def test_a_picture_is_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    step = {"rollout/accuracy": 0.5, "rollout/response_length_mean": 30.0, "actor/entropy": None}
    records = [{"step": 0, "eval/accuracy": 0.4}, *({"step": i, **step} for i in (1, 2, 3))]
    runs = [write_run(tmp_path / name, records) for name in ("one", "two")]
    out = tmp_path / "two.png"
    main([*map(str, runs), "--out", str(out), "--against", "step", "seconds"])
    assert out.read_bytes().startswith(b"\x89PNG") and capsys.readouterr().out == f"{out}\n"


@pytest.mark.parametrize(
    ("labels", "kinds"),
    [
        (["grpo-seed0", "grpo-seed1", "dapo"], ["grpo", "grpo", "dapo"]),
        (["a/seed0", "b/seed0"], ["a/seed0", "b/seed0"]),
        (["seed0", "seed1"], ["seed0", "seed1"]),
    ],
)
def test_runs_that_differ_in_their_seed_are_of_one_kind(labels, kinds):
    assert kinds_of(labels) == kinds


@pytest.mark.parametrize(
    ("run", "out", "message"),
    [
        pytest.param("nothing", "a.png", "nothing is no run", id="no-run"),
        pytest.param("good", "nowhere/a.png", "nowhere/a.png cannot be written", id="no-folder"),
    ],
)
def test_errors_of_the_command(run, out, message, tmp_path):
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "good", [{"step": 1, "rollout/accuracy": 0.5}])
    with pytest.raises(SystemExit, match=message):
        main([str(tmp_path / run), "--out", str(tmp_path / out)])
