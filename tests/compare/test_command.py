"""Runs side by side: what they have come to, in what they differ, and their curves; runs that lack something too."""

import sys
from pathlib import Path

import pytest

from dapo.tools.compare import main
from tests.support.fakes import make_group
from tests.support.results.run_files import asked, step_line, store_starts, write_run


def evaluated(step: int, value: float) -> dict[str, float]:
    return {
        "step": step,
        **{f"eval/{name}accuracy": value for name in ("", "sums/")},
        "eval/sums/accuracy_low": value - 0.1,
        "eval/sums/accuracy_high": value + 0.1,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One that has ended, one like it with other settings, one of three steps that goes on without evaluations, and one
    that has just begun."""
    folder = tmp_path_factory.mktemp("runs")
    lines = [evaluated(0, 0.5), *(step_line(step, 0.1 * step) for step in range(1, 5)), evaluated(4, 0.75)]
    paths = []
    for name, right, seed in (("one", 2, 0), ("other", 3, 7)):
        path = write_run(folder / name, lines, "trainer.total_steps=4", f"trainer.seed={seed}", "trainer.device=cpu")
        store = store_starts(path, ((1, 2, 3, 4), True, 0))
        store.evaluation(4, "sums", [make_group(n, [float(n < right)] * 2) for n in range(4)])
        store.close()
        paths.append(path)
    going = [step_line(step, 0.9) for step in (1, 2, 3)]
    del going[-1]["ledger/goodput"]
    paths.append(write_run(folder / "going", going, "trainer.total_steps=80"))
    with (paths[-1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rollout/acc')
    paths.append(write_run(folder / "begun", [], "trainer.total_steps=80"))
    (paths[-1] / "metrics.jsonl").unlink()
    return list(map(str, paths))


def cells(out: str) -> dict[str, list[str]]:
    """The cells of each row by its name."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows if row[0] != "---"}


def test_results_with_intervals_and_a_dash_for_what_a_run_lacks(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(runs)
    found = cells(capsys.readouterr().out)
    assert found[""] == ["one", "other", "going", "begun"]
    assert found["steps"] == ["4 of 4", "4 of 4", "3 of 80", "0 of 80"]
    assert found["held-out accuracy, first"][1:] == ["0.500 at 0", "-", "-"], "a mean over sets has no interval"
    assert found["held-out accuracy sums, last"] == ["0.750 (0.650 to 0.850) at 4"] * 2 + ["-", "-"]
    [own, against, *others] = found["held-out accuracy sums, last − that of the first run"]
    assert own == "-" and against.startswith("+0.250 (") and "over 4 problems" in against and others == ["-", "-"]
    assert found["accuracy of drawn groups, last"][2:] == ["0.900 at 3", "-"]
    assert found["tokens generated"] == ["400", "400", "300", "-"]
    assert found["tokens trained on"] == ["300", "300", "-", "-"]
    assert found["wall time"] == ["30m", "30m", "30s", "-"] and found["seconds a step"][3] == "-"
    assert found["generation, share of the steps"] == ["60%"] * 3 + ["-"]
    assert found["cost"][:2] == ["CPU, no GPU hours"] * 2 and found["starts"] == ["1", "1", "-", "-"]


@pytest.mark.parametrize(
    ("there", "over"),
    [
        pytest.param("badc", "+0.500 (+0.000 to +1.000) over 4 problems", id="in another order"),
        pytest.param("xbcd", "+0.333 (+0.000 to +1.000) over 3 problems", id="one edited"),
        pytest.param("ABCD", "+0.500 (+0.000 to +1.000) over 4 problems", id="under another template"),
        pytest.param("BADC", "-", id="under another template in another order"),
    ],
)
def test_problems_are_paired_by_what_they_ask(
    there: str, over: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`a` and `d` have one ground truth, `b` and `c` another; capitals are the same problems, rendered otherwise."""
    right = {"one": "cd", "other": "abcdABCD"}
    for name, letters in (("one", "abcd"), ("other", there)):
        folder = write_run(tmp_path / name, [evaluated(0, 0.5), step_line(1, 0.5), evaluated(1, 0.5)])
        store = store_starts(folder, ((1,), True, 0))
        groups = [
            asked(number, letter, "12"[letter.lower() in "bc"], float(letter in right[name]))
            for number, letter in enumerate(letters)
        ]
        store.evaluation(1, "sums", groups)
        store.close()
    main([str(tmp_path / name) for name in right])
    found = cells(capsys.readouterr().out).get("held-out accuracy sums, last − that of the first run", ["-", "-"])
    assert found[1] == over


def test_only_keys_that_differ(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(runs[:3])
    found = cells(capsys.readouterr().out.partition("\n\n")[2])
    assert found == {
        "key": ["one", "other", "going"],
        "trainer.seed": ["0", "7", "0"],
        "trainer.total_steps": ["4", "4", "80"],
        "trainer.device": ["cpu", "cpu", "auto"],
    }
    main([runs[0], runs[0]])
    assert capsys.readouterr().out.endswith("The configurations are the same.\n")


def test_on_a_terminal_the_runs_that_fit_stand_beside_each_other(
    runs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(runs)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80 and not [line for line in lines if line.startswith("|")]
    heads = [line.split() for line in lines if set(line.split()) & {"one", "going"}]
    assert heads[:3] == [["one", "other"], ["going", "begun"], ["key", "one", "other"]]
    assert [line.split() for line in lines if line.startswith("starts")] == [["starts", "1", "1"], ["starts", "-", "-"]]


def test_curves_over_steps_tokens_and_seconds(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    out = tmp_path / "curves.png"
    main([*runs, "--png", str(out)])
    capsys.readouterr()
    assert out.read_bytes().startswith(b"\x89PNG")
    held_out = [[list(line.get_xdata()) for line in axis.lines] for axis in kept[0].axes[:3]]
    assert held_out == [[x, x, [], []] for x in ([0, 4], [0, 400], [0, 40])]
    assert [axis.get_xlabel() for axis in kept[0].axes[-3:]] == ["step", "tokens generated", "seconds of all steps"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing is no run: it holds no config.yaml of one"),
        (["other"], "other is no run"),
        (["good", "--png", "nowhere/a.png"], "nowhere/a.png cannot be written"),
    ],
)
def test_errors(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("good"), [step_line(1, 0.5)])
    Path("other").mkdir()
    Path("other/config.yaml").write_text("a: 1\n")
    with pytest.raises(SystemExit, match=message):
        main(arguments)
