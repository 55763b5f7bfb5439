"""The questions that a person asks of a run, as commands; what a model wrote does nothing to the terminal."""

import json
import math
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from dapo.algorithm.fate import TRAINED
from dapo.config.schema import LoggingConfig
from dapo.report.store.samples import SampleStore
from dapo.report.store.schema import VERSION
from dapo.tools.inspect.__main__ import main
from dapo.tools.inspect.show import around, cell
from dapo.types import Group
from tests.support.fakes import make_group
from tests.support.store.stored import collected_of

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]bold[/red] :smile: \u202eevil\r\n" + "<script>" + "\x00end"


def scored(index: int, accuracies: list[float], texts: list[str], **parts: list[float]) -> Group:
    group = make_group(index, accuracies)
    return replace(
        group,
        responses=tuple(replace(each, text=text) for each, text in zip(group.responses, texts, strict=True)),
        scores=tuple(
            replace(score, parts={name: values[sample] for name, values in parts.items()})
            for sample, score in enumerate(group.scores)
        ),
    )


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Three steps: prompt 5 is dropped at step 2, step 3 is slow."""
    directory = tmp_path_factory.mktemp("run")
    store = SampleStore(directory, LoggingConfig(), warn=pytest.fail)
    store.begin({})
    store.resume(0)
    mixed = scored(4, [1.0, 0.0], ["It is Seven_%", "no"], math=[1.0, -1.0], format=[0.0, 1.0])
    wrong = scored(5, [0.0, 0.0], [HOSTILE, "wrong"], math=[-1.0, -1.0], format=[0.0, 1.0])
    unscorable = scored(6, [math.nan, 1.0], ["odd", "seven\nlines"], math=[math.nan, 1.0], format=[1.0, 1.0])
    cut = replace(mixed.responses[1], finish_reason="length")
    long = replace(mixed, draw=replace(mixed.draw, index=14), responses=(mixed.responses[0], cut))
    for step, (groups, fates) in enumerate(
        [
            ([mixed], [TRAINED]),
            ([wrong, unscorable], ["all_wrong", "unscorable"]),
            ([long], [TRAINED]),
        ],
        1,
    ):
        store.metrics(step, {f"perf/{phase}_s": 1.0 for phase in ("step", "generation", "update")})
        if step == 3:
            store.event("warning", "engine 1 is lost: its process has ended")
            store.metrics(step, {"perf/step_s": 9.0, "perf/generation_s": 9.0})
        whole = collected_of(groups)
        trained = tuple(group for group, fate in zip(groups, fates, strict=True) if fate == TRAINED)
        store.step(step, replace(whole, groups=trained, fates=tuple(fates)))
    store.close()
    return directory


def shown(capsys, run: Path, *question: str) -> str:
    main([str(run), *question])
    return capsys.readouterr().out


def lines_with(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_how_often_each_prompt_was_drawn(run, capsys):
    most = shown(capsys, run, "prompts", "--limit", "2").splitlines()
    assert [line.split()[:3] for line in most if line.split() and line.split()[0] in "456"] == [
        ["4", "2", "0.5"],
        ["5", "1", "0.25"],
    ]


def test_why_was_a_prompt_dropped_at_a_step(run, capsys):
    out = shown(capsys, run, "prompt", "5")
    [line] = lines_with(out, "dropped, all wrong: 0 right of 2")
    assert line.split()[:2] == ["2", "5"]
    out = shown(capsys, run, "step", "2")
    assert len(lines_with(out, "dropped, all wrong")) == len(lines_with(out, "dropped, unscorable: 1 of 2")) == 1
    assert "step 2: 2 groups" in out


def test_which_evaluation_was_best(run, tmp_path, capsys):
    store = SampleStore(tmp_path, LoggingConfig(), warn=pytest.fail)
    for step, accuracy in ((0, 0.25), (2, 0.75), (4, 0.5)):
        both = {"eval/accuracy": accuracy, "eval/accuracy_low": accuracy - 0.1, "eval/pass@4": 0.9, "eval/samples": 8.0}
        store.metrics(step, both | {"eval/aime/accuracy": 1 - accuracy})
    store.close()
    assert "`eval.every`" in shown(capsys, run, "evaluations"), "a run without one says how to have one"
    out = shown(capsys, tmp_path, "evaluations")
    assert [line.split() for line in lines_with(out, "best")] == [
        ["2", "0.75", "0.65", "–", "0.9", "best"],
        ["0", "0.75", "–", "–", "best"],
    ]
    assert lines_with(out, "held-out accuracy/aime") and not lines_with(out, "samples")


def test_answers_of_each_kind(run, capsys):
    assert lines_with(shown(capsys, run, "best", "--limit", "1"), "It is Seven_%")
    assert lines_with(shown(capsys, run, "worst", "--step", "2"), "wrong")
    assert lines_with(shown(capsys, run, "worst", "--step", "1", "--limit", "1"), "  no")
    assert len(lines_with(shown(capsys, run, "longest", "--limit", "2"), "trained")) == 1
    [line] = lines_with(shown(capsys, run, "truncated"), "trained")
    assert line.split()[:3] == ["3", "14", "1"]
    [line] = lines_with(shown(capsys, run, "unscorable"), "odd")
    assert "–" in line
    out = shown(capsys, run, "draw", "6")
    assert "sample 0: accuracy –" in out and "seven\nlines" in out


QUESTIONS = [
    "steps",
    "step 2",
    "prompt 5",
    "draw 5",
    "prompts",
    "worst",
    "search e",
    "events",
    "evaluations",
    "findings",
]


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_table_is_as_wide_as_the_terminal(run, capsys, monkeypatch, question: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = shown(capsys, run, *question.split())
    assert max(cell_len(line) for line in out.splitlines()) <= width
    if question == "worst":
        assert len(lines_with(out, "trained")) == 4, "an answer takes one line"
    if question == "steps":
        assert "not shown for lack of width: " in out
        assert "overlong" not in out.partition("not shown")[0]
        assert "not shown" not in shown(capsys, run, "steps", "--wide")


def test_evaluations_of_the_runs_checkpoints_are_shown(run, tmp_path, capsys) -> None:
    shutil.copy(run / "samples.sqlite", tmp_path)
    average = {"avg@2": {"value": 0.5, "low": 0.25, "high": 0.75}}
    one = {"name": "aime", "source": "", "problems": 30, "samples": 2, "estimates": average}
    (tmp_path / "evaluation_001.json").write_text(json.dumps({"model": "/a/step_000007/hf", "summaries": [one]}))
    [line] = lines_with(shown(capsys, tmp_path, "evaluations"), "evaluation_001.json")
    assert line.split()[1:] == ["step_000007/hf", "aime", "30", "2", "0.5", "0.25", "0.75"]


def test_search_takes_its_words_as_they_are(run, capsys):
    for text, found in (("SEVEN", 3), ("seven_%", 2), ("n_%", 2), ("seven%", 0), ("_", 2), ("\\", 0), ("zzz", 0)):
        out = shown(capsys, run, "search", text)
        assert len(lines_with(out, "trained")) + len(lines_with(out, "unscorable")) == found, text


def test_what_a_model_wrote_reaches_the_terminal_as_text(run, capsys):
    for question in (["draw", "5"], ["search", "bold"], ["worst"]):
        out = shown(capsys, run, *question)
        assert not set(out) & {"\x1b", "\x07", "\r", "\x00", "\u202e"}
        assert "[red]bold[/red] :smile:" in out


def test_what_is_not_there_is_said(run, tmp_path):
    for kind, question in (("step", "step"), ("prompt", "prompt"), ("group of draw", "draw")):
        with pytest.raises(SystemExit, match=f"has no {kind} 77"):
            main([str(run), question, "77"])
    store = SampleStore(tmp_path, LoggingConfig(), warn=pytest.fail)
    store.begin({})
    store.resume(0)
    store.close()
    with pytest.raises(SystemExit, match="has no step yet; wait for the first one"):
        main([str(tmp_path), "--html", str(tmp_path / "page.html")])


def test_an_unknown_question_leads_to_the_nearest(run, capsys):
    with pytest.raises(SystemExit):
        main([str(run), "stpes"])
    assert capsys.readouterr().err.endswith("; did you mean `steps`?\n")


def test_no_store_and_one_of_another_version_are_refused(run, tmp_path):
    with pytest.raises(SystemExit, match="is not there; give the `trainer.output_dir`"):
        main([str(tmp_path)])
    copy = tmp_path / "samples.sqlite"
    shutil.copy(run / "samples.sqlite", copy)
    main([str(copy)])
    with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(SystemExit, match=f"is of version {VERSION + 1}"):
        main([str(tmp_path)])
    copy.write_bytes(b"no database at all" * 100)
    with pytest.raises(SystemExit, match="cannot be read"):
        main([str(tmp_path)])
    data = (run / "samples.sqlite").read_bytes()
    for damaged in (data[:8192] + b"\x5a" * (len(data) - 8192), data[: len(data) // 2]):
        copy.write_bytes(damaged)
        with pytest.raises(SystemExit, match=r"^dapo.inspect: .*samples.sqlite cannot be read \(.*\.recover") as error:
            main([str(copy)])
        assert "cannot be written to" not in str(error.value)


def test_cells_and_texts_are_short_and_without_controls():
    values = [None, math.nan, 0.12345, 12345.6, 7, "a\nb\x1b", "a\u3000b"]
    assert [cell(value) for value in values] == ["–", "–", "0.123", "12346", "7", "a⏎b�", "a b"]
    text = "a" * 500 + "needle" + "b" * 500
    assert "aneedleb" in around(text, "Needle") and len(around(text, "Needle")) < 80
    assert around("needle", "needle") == "needle"
