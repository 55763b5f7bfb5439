"""The questions that a person asks of a run, as commands; what a model wrote does nothing to the terminal."""

import math
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dapo.config.schema import LoggingConfig
from dapo.inspect.__main__ import main
from dapo.inspect.show import around, cell
from dapo.report.console import plain
from dapo.sampling.draws import TRAINED
from dapo.store.samples import SampleStore
from dapo.store.schema import VERSION
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
    least = shown(capsys, run, "prompts", "--least")
    assert [line.split()[0] for line in least.splitlines() if line.split() and line.split()[0] in "456"] == [
        "5",
        "6",
        "4",
    ]


def test_why_was_a_prompt_dropped_at_a_step(run, capsys):
    out = shown(capsys, run, "prompt", "5")
    [line] = lines_with(out, "dropped, all wrong: 0 right of 2")
    assert line.split()[:2] == ["2", "5"]
    out = shown(capsys, run, "step", "2")
    assert len(lines_with(out, "dropped, all wrong")) == len(lines_with(out, "dropped, unscorable: 1 of 2")) == 1
    assert "step 2: 2 groups" in out


def test_which_reward_function_disagrees_most(run, capsys):
    out = shown(capsys, run, "rewards")
    first, second = lines_with(out, "format"), lines_with(out, "math")
    assert [line.split() for line in first + second] == [
        ["1", "2", "0.333", "0.75", "4", "format"],
        ["0", "2", "1", "-1", "–", "math"],
    ]
    assert out.index("format") < out.index("math")


def test_a_function_that_gives_all_answers_as_much_is_none_that_disagrees(run, tmp_path, capsys):
    store = SampleStore(tmp_path, LoggingConfig(), warn=pytest.fail)
    parts = {"math": [0.0, 1.0], "overlong": [0.0, 0.0]}
    store.step(1, collected_of([scored(1, [1.0, 0.0], ["yes", "no"], **parts)]))
    store.close()
    out = shown(capsys, tmp_path, "rewards")
    assert out.index("math") < out.index("overlong, which says nothing")


def test_which_evaluation_was_best(tmp_path, capsys):
    store = SampleStore(tmp_path, LoggingConfig(), warn=pytest.fail)
    for step, accuracy in ((0, 0.25), (2, 0.75), (4, 0.5)):
        both = {"eval/accuracy": accuracy, "eval/accuracy_low": accuracy - 0.1, "eval/pass@4": 0.9, "eval/samples": 8.0}
        store.metrics(step, both | {"eval/aime/accuracy": 1 - accuracy})
    store.close()
    out = shown(capsys, tmp_path, "evaluations")
    assert [line.split() for line in lines_with(out, "best")] == [
        ["2", "0.75", "0.65", "–", "0.9", "best"],
        ["0", "0.75", "–", "–", "best"],
    ]
    assert lines_with(out, "held-out accuracy/aime") and not lines_with(out, "samples")


def test_a_run_without_evaluation_says_how_to_have_one(run, capsys):
    assert "`eval.every`" in shown(capsys, run, "evaluations")


def test_which_step_was_slowest_and_why(run, capsys):
    out = shown(capsys, run, "steps", "--slowest", "--last", "1")
    [line] = lines_with(out, "generation 9 s (median 1 s)")
    assert line.split()[0] == "3" and "engine 1 is lost" in line, "it was told after step 2, while step 3 was collected"
    assert len(lines_with(shown(capsys, run), " 1 ")) >= 3


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


@pytest.mark.parametrize(
    ("text", "found"), [("SEVEN", 3), ("seven_%", 2), ("n_%", 2), ("seven%", 0), ("_", 2), ("\\", 0), ("zzz", 0)]
)
def test_search_takes_its_words_as_they_are(text, found, run, capsys):
    out = shown(capsys, run, "search", text)
    assert len(lines_with(out, "trained")) + len(lines_with(out, "unscorable")) == found


def test_search_says_what_it_could_not_search(run, tmp_path, capsys):
    assert "searched" not in shown(capsys, run, "search", "zzz")
    store = SampleStore(tmp_path, LoggingConfig(sample_fraction=0.5, max_text_bytes=20), warn=pytest.fail)
    for step in (1, 2):
        draws = range(2 * step, 2 * step + 2)
        store.step(step, collected_of([scored(draw, [1.0, 0.0], ["needle " * 9, "short"]) for draw in draws]))
    store.close()
    out = shown(capsys, tmp_path, "search", "zzz")
    assert "4 of 8 have no text that was kept (`logging.sample_fraction`" in out
    assert "2 of 8 have only their beginning and their end (`logging.max_text_bytes`)" in out
    assert "2 of 4 have no text" in shown(capsys, tmp_path, "search", "zzz", "--step", "1")


def test_what_a_model_wrote_reaches_the_terminal_as_text(run, capsys):
    for question in (["draw", "5"], ["search", "bold"], ["worst"]):
        out = shown(capsys, run, *question)
        assert not set(out) & {"\x1b", "\x07", "\r", "\x00", "\u202e"}
        assert "[red]bold[/red] :smile:" in out


def test_events_and_an_empty_answer(run, capsys):
    assert lines_with(shown(capsys, run, "events", "--last", "5"), "warning", "engine 1 is lost")
    assert not lines_with(shown(capsys, run, "events", "--last", "1"), "resume")
    assert "truncated answers: 0 of 0 in step 1" in shown(capsys, run, "truncated", "--step", "1")
    assert "worst answers: 1 of 7 in the run" in shown(capsys, run, "worst", "--limit", "1")
    assert "3 steps, 2 to 3 shown" in shown(capsys, run, "steps", "--last", "2")


@pytest.mark.parametrize(
    ("question", "says"),
    [
        (["step", "9"], "has no step 9"),
        (["prompt", "77"], "has no prompt 77"),
        (["draw", "77"], "has no group of draw 77"),
    ],
)
def test_what_is_not_there_is_said(question, says, run):
    with pytest.raises(SystemExit, match=says):
        main([str(run), *question])


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
    data = bytearray((run / "samples.sqlite").read_bytes())
    data[8192:] = b"\x5a" * (len(data) - 8192)
    copy.write_bytes(data)
    with pytest.raises(SystemExit, match=r"^dapo.inspect: .*samples.sqlite cannot be read \(.*malformed.*\.recover"):
        main([str(copy)])


def test_where_the_steps_before_a_store_that_was_set_aside_are(run, tmp_path, capsys):
    shutil.copy(run / "samples.sqlite", tmp_path / "samples.sqlite")
    main([str(tmp_path)])
    assert capsys.readouterr().err == ""
    (tmp_path / "samples.damaged.sqlite").touch()
    for question in ([], ["--html", str(tmp_path / "run.html")]):
        main([str(tmp_path), *question])
        assert f"{tmp_path / 'samples.damaged.sqlite'} has what was there before" in capsys.readouterr().err
    main([str(tmp_path / "samples.sqlite")])
    assert capsys.readouterr().err == "", "a person has chosen"


def test_a_run_is_read_while_it_is_written_and_its_pipe_may_end(run, tmp_path):
    store = SampleStore(tmp_path, LoggingConfig(), warn=pytest.fail)
    for step in range(1, 1500):
        store.step(step, collected_of([make_group(step, [1.0, 0.0])]))
    store.flush()
    command = f"{sys.executable} -m dapo.inspect {tmp_path} steps --last 1500 | head -3"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    store.close()
    assert done.stdout.startswith("1499 steps") and not done.stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0.12345, "0.123"),
        (12345.6, "12346"),
        (7, "7"),
        ("a\nb\x1b", "a⏎b�"),
        ("a\u3000b", "a b"),
    ],
)
def test_cells(value, text):
    assert cell(value) == text


def test_texts_are_shortened_around_what_was_found():
    text = "a" * 500 + "needle" + "b" * 500
    assert "aNEEDLEb".lower() in around(text, "Needle") and len(around(text, "Needle")) < 80
    assert around("needle", "needle") == "needle"
    assert plain("a\tb") == "a b"


@pytest.mark.parametrize("damage", ["cut in half", "no database"])
def test_a_damaged_store_is_not_told_of_a_folder_that_cannot_be_written_to(tmp_path, run, damage):
    file = tmp_path / "samples.sqlite"
    with closing(sqlite3.connect(run / "samples.sqlite")) as old, closing(sqlite3.connect(file)) as new:
        old.backup(new)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage == "cut in half" else b"step,accuracy\n" * 1000)
    with pytest.raises(SystemExit) as error:
        main([str(tmp_path)])
    assert "samples.sqlite cannot be read (" in str(error.value) and ".recover" in str(error.value)
    assert "cannot be written to" not in str(error.value)


def test_a_timeline_before_the_first_step_says_to_wait(tmp_path):
    store = SampleStore(tmp_path, LoggingConfig(), warn=pytest.fail)
    store.begin({})
    store.resume(0)
    store.close()
    with pytest.raises(SystemExit, match="has no step yet; wait for the first one to end"):
        main([str(tmp_path), "timeline"])
