"""What a run has come to, over all its starts, and what is written and told of it when it ends."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from dapo.report.store.reader import Reader
from dapo.report.store.schema import UNNAMED
from dapo.results import plot
from dapo.results.figures import results
from dapo.results.runs import read_run
from dapo.results.summary import CURVES, SUMMARY, conclude, concluded, text
from dapo.state.lease import LeaseLost
from dapo.tools.compare import main as compare
from dapo.types import Group
from tests.support.results.run_files import asked, step_line, store_starts, write_run


def restarted(engines: int, workers: int = 0) -> dict[str, float]:
    return {"perf/restarted_engines": float(engines), "perf/restarted_reward_workers": float(workers)}


def evaluated(step: int, value: float, low: float, high: float) -> dict[str, float]:
    return {"step": step, "eval/accuracy": value, "eval/accuracy_low": low, "eval/accuracy_high": high}


def held(number: int, *accuracies: float) -> Group:
    """Answers to a held-out prompt, whose number a training prompt has too."""
    return asked(number, f"{number}", "held out", *accuracies)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps; a start was killed after three of them, and its one engine that was replaced counts, as does one of
    the next start, whose count begins anew."""
    lines = [evaluated(0, 0.25, 0.1, 0.4)]
    lines += [step_line(step, 0.1 * step, **restarted(1)) for step in (1, 2, 3)]
    lines += [evaluated(3, 0.75, 0.6, 0.9)]
    lines += [step_line(step, 0.1 * step, **restarted(1 + (step == 6), 3)) for step in (4, 5, 6)]
    lines += [evaluated(6, 0.5, 0.35, 0.65)]
    folder = write_run(tmp_path_factory.mktemp("run") / "adds", lines, "trainer.total_steps=8")
    store = store_starts(folder, ((1, 2, 3), False, 6), ((4, 5, 6), True, 4))
    store.event("failed_save", "step 4")
    none = held(9, math.nan, math.nan)  # of which there is no verdict
    store.evaluation(0, UNNAMED, [*(held(n, float(n == 3), 0.0) for n in range(4)), held(9, 1.0, 0.0)])
    after = [held(n, 1.0, math.nan if n < 2 else 0.0) for n in range(4)]
    store.evaluation(6, UNNAMED, [*after, none, held(10, 1.0, 1.0)])  # the last was not asked before
    store.close()
    return folder


def test_the_whole_run_counts_with_all_its_starts(run: Path) -> None:
    found = results(read_run(run))
    assert (found.name, found.steps, found.total_steps, found.starts) == ("adds", 6, 8, 2)
    assert (found.tokens_generated, found.tokens_trained, found.goodput) == (600, 450, 0.75)
    assert found.seconds["wall"] == 3600 and found.seconds["steps"] == 60 and found.seconds["generation"] == 36
    counted = {name: count for name, count in found.faults.items() if count}
    assert counted == {"restarted_engines": 3, "restarted_reward_workers": 3, "failed_saves": 1, "killed_starts": 1}
    assert (found.gpus, found.gpu_hours) == (4, 0.5 * 6 + 0.5 * 4)
    assert found.latest == {"rollout/response_length_mean": 30.0, "rollout/truncated": None, "actor/entropy": None}


def test_accuracy_from_and_to_with_intervals(run: Path) -> None:
    found = results(read_run(run))
    [held_out] = found.held_out
    assert [(p.step, p.value, p.low, p.high) for p in (held_out.first, held_out.last, held_out.best)] == [
        (0, 0.25, 0.1, 0.4),
        (6, 0.5, 0.35, 0.65),
        (3, 0.75, 0.6, 0.9),
    ]
    gain = held_out.gain
    assert gain and gain.problems == 4 and gain.value == pytest.approx((1.0 + 1.0 + 0.5 + 0.0) / 4)
    assert gain.low < gain.value < gain.high
    with Reader(run) as store:
        assert {row["ground_truth"] for row in store.held_out(6)} == {"held out"}, "no training prompt of that number"
    drawn = found.drawn
    assert drawn and drawn.first.value == pytest.approx(0.2) and drawn.last.value == pytest.approx(0.5)
    assert (drawn.last.low, drawn.last.high) == (pytest.approx(0.4), pytest.approx(0.6)), "of three steps"


@pytest.mark.parametrize(
    ("later", "gain", "told"),
    [
        ([("d", 1.0), ("e", 1.0)], None, ""),
        ([("e", 1.0), ("a", 1.0), ("b", 0.0)], 0.5, "; gain +0.500 (+0.000 to +1.000) over 2 problems"),
    ],
)
def test_a_gain_is_of_the_same_problems_where_the_held_out_files_have_changed(
    later: list[tuple[str, float]], gain: float | None, told: str, tmp_path: Path
) -> None:
    """All have the same ground truth, so that it tells none from the others."""
    truth = "held out"
    folder = write_run(tmp_path / "run", [evaluated(0, 0.0, 0.0, 0.1), step_line(1, 0.5), evaluated(1, 0.5, 0.4, 0.6)])
    store = store_starts(folder, ((1,), True, 0))
    store.evaluation(0, UNNAMED, [asked(number, text, truth, 0.0) for number, text in enumerate("abc")])
    store.evaluation(1, UNNAMED, [asked(number, text, truth, value) for number, (text, value) in enumerate(later)])
    store.close()
    found = results(read_run(folder))
    [held_out] = found.held_out
    assert (held_out.gain and held_out.gain.value) == gain and told in text(found)


def test_what_a_person_is_told(run: Path) -> None:
    told = text(results(read_run(run)))
    assert "summary: 6 of 8 steps in 1h00m, started 2 times" in told
    assert ": 0.250 (0.100 to 0.400) at step 0 -> 0.500 (0.350 to 0.650) at step 6; gain +0.625" in told
    assert "best 0.750 at step 3" in told and "600 generated, 450 of them trained on (goodput 0.750)" in told
    assert "generation 60% of 60s" in told and "5.0 GPU hours (4 GPUs)" in told
    assert "survived: restarted engines 3, restarted reward workers 3, failed saves 1, killed starts 1\n" in told


def test_a_run_without_store_and_evaluations_has_what_its_lines_tell(tmp_path: Path) -> None:
    lines = [step_line(1, 0.5, **restarted(2)), step_line(2, 0.7, **restarted(1)), step_line(3, 0.6, **restarted(1))]
    found = results(read_run(write_run(tmp_path / "run", lines, "trainer.device=cpu")))
    assert found.held_out == () and found.starts is None and found.seconds["wall"] == 30
    assert found.faults["restarted_engines"] == 3, "a count that falls is of another process"
    assert "failed_saves" not in found.faults and found.gpu_hours is None
    told = text(found)
    assert "accuracy of drawn groups: 0.500 at step 1 -> 0.600 at step 3; best 0.700 at step 2" in told
    assert "cost: -" in told


def test_a_run_that_began_from_the_checkpoint_of_another_says_which_steps_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is complete, and took fewer steps than `trainer.total_steps` (`checkpoint.resume=PATH`)."""
    folder = write_run(tmp_path / "run", [step_line(step, 0.5) for step in (7, 8)], "trainer.total_steps=8")
    found = results(read_run(folder))
    assert found.steps == 2 and text(found).startswith("summary: steps 7 to 8 of 8 in 20s\n")
    compare([str(folder)])
    assert "| steps | 7 to 8 of 8 |" in capsys.readouterr().out


def test_a_run_of_no_step_yet_has_results(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/accu')  # being written
    store_starts(folder, ((), False, 0)).close()
    found = results(read_run(folder))
    assert found.starts == 1 and found.faults["killed_starts"] == 0, "it is running"
    assert found.steps == found.seconds["wall"] == 0 and found.drawn is None and found.tokens_generated is None


@pytest.mark.parametrize("broken", ["nothing", "picture"])
def test_the_end_of_a_run_writes_its_files_and_keeps_its_error(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", [], "trainer.total_steps=80")
    if broken == "picture":
        monkeypatch.setattr(plot, "draw", lambda *_, **__: 1 / 0)
    with pytest.raises(RuntimeError, match="an engine is gone"), concluded(folder, lambda: None):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(step_line(1, 0.5)) + "\n")
        raise RuntimeError("an engine is gone")
    printed = capsys.readouterr()
    assert printed.out.startswith("summary: 1 of 80 steps")
    assert json.loads((folder / SUMMARY).read_text()) == json.loads(json.dumps(asdict(results(read_run(folder)))))
    assert (folder / CURVES).exists() == (broken == "nothing")
    assert printed.err == (
        "" if broken == "nothing" else f"the summary of {folder} is not complete: ZeroDivisionError: division by zero\n"
    )


def test_nothing_is_written_without_a_step_or_into_what_is_another_runs(tmp_path: Path, capsys) -> None:
    folder = write_run(tmp_path / "run", [step_line(1, 0.5)])

    def lost() -> None:
        raise LeaseLost("another run has it")

    with concluded(folder, lambda: None):
        pass  # this start has reported nothing
    conclude(folder, lost)
    conclude(write_run(tmp_path / "begun", [evaluated(0, 0.1, 0, 1)]), lambda: None)
    assert not list(tmp_path.glob(f"*/{SUMMARY}")) and capsys.readouterr() == ("", "")
    (folder / "config.yaml").unlink()
    conclude(folder, lambda: None)
    assert f"the summary of {folder} is not complete: ValueError" in capsys.readouterr().err
