"""What is logged can be read again, by us and by TensorBoard, also after a crash, a resume and on a full disk."""

import io
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dapo.report.log import BUFFER_BYTES, MetricsLogger, evaluated, example, progress_line, read_metrics
from dapo.report.sinks.events import TensorBoard
from tests.support.fakes import make_group


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def tensorboard_of(path: Path):
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    return EventAccumulator(str(path / "tensorboard" / path.name), size_guidance={TENSORS: 0}).Reload()


@pytest.fixture
def another_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event file begins in a second of its own: TensorBoard reads them in the order of these."""
    seconds = itertools.count(1_000_000_000)
    clock = SimpleNamespace(time=lambda: next(seconds))
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)


def test_a_line_per_call_is_there_at_once(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    logger.log(1, {"rollout/accuracy": 0.5, "actor/loss": math.nan, "x": -math.inf, "buffer/drawn": 3})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line.endswith("\n") and line.count("\n") == 1
    expected = {"step": 1, "rollout/accuracy": 0.5, "actor/loss": None, "x": None, "buffer/drawn": 3.0}
    assert json.loads(line, parse_constant=pytest.fail) == expected
    logger.text(1, "sample/0", "nowhere to show it")
    logger.close()
    logger.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    [read] = read_metrics(tmp_path / "metrics.jsonl")
    assert read["rollout/accuracy"] == 0.5 and math.isnan(read["actor/loss"])


@pytest.mark.parametrize(("step", "left"), [(0, []), (2, [0, 1, 2, 2]), (9, [0, 1, 2, 2, 3])])
@pytest.mark.parametrize("torn", ["", '{"step": 4, "a', '{"step": 99}', "4\n", "\n", "\0\n", "\udcff\n"])
def test_resuming_drops_what_is_later_or_torn(step: int, left: list[int], torn: str, tmp_path: Path) -> None:
    first = MetricsLogger(tmp_path)
    for logged in (0, 1, 2, 2, 3):
        first.log(logged, {"a": logged})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a", errors="surrogateescape") as file:
        file.write(torn)  # as a power failure may leave it
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")][:5] == [0, 1, 2, 2, 3]
    second = MetricsLogger(tmp_path)
    second.resume(step)
    second.log(step + 1, {"a": 0})
    second.close()
    assert steps_in(tmp_path) == [*left, step + 1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_reads_scalars_and_texts(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, [TensorBoard(tmp_path)])
    logger.log(1, {"rollout/accuracy": 0.25, "actor/loss": math.nan, "late": 0, "never": 0})
    logger.log(2, {"rollout/accuracy": 0.5, "late": 0, "never": 0})
    logger.log(3, {"late": 1, "never": 0})
    logger.text(2, "sample/0", "**prompt** 1+1 = \ud800?")
    reader = tensorboard_of(tmp_path)  # before close: a live run can be watched
    assert [(event.step, event.value) for event in reader.Scalars("rollout/accuracy")] == [(1, 0.25), (2, 0.5)]
    assert [(event.step, event.value) for event in reader.Scalars("late")] == [(2, 0.0), (3, 1.0)]
    assert sorted(reader.Tags()["scalars"]) == ["actor/loss", "late", "rollout/accuracy"], "no empty chart"
    (text,) = reader.Tensors("sample/0/text_summary")
    assert (text.step, text.tensor_proto.string_val[0]) == (2, b"**prompt** 1+1 = ??")
    assert reader.SummaryMetadata("sample/0/text_summary").plugin_data.plugin_name == "text"
    assert reader.PluginTagToContent("custom_scalars"), "a tab with the first things to look at"
    logger.close()


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("step", [0, 2, 4])
def test_tensorboard_shows_no_step_twice(step: int, killed: bool, tmp_path: Path, another_second: None) -> None:
    """killed: another process goes on; else the same logger does, as after lost actors."""
    first = MetricsLogger(tmp_path, [TensorBoard(tmp_path)])
    first.resume(0)
    for logged in range(5):
        first.log(logged, {"a": logged})
    second = MetricsLogger(tmp_path, [TensorBoard(tmp_path)]) if killed else first
    second.resume(step)
    second.log(step + 1, {"a": 10 * (step + 1)})
    expected = [(kept, kept) for kept in range(step + 1)] if step else []
    found = [(event.step, event.value) for event in tensorboard_of(tmp_path).Scalars("a")]
    assert found == [*expected, (step + 1, 10 * (step + 1))]
    first.close()
    second.close()


def test_progress_line() -> None:
    groups = {"buffer/mixed": 16.0, "buffer/all_wrong": 8.0, "buffer/all_correct": 3.0, "buffer/unscorable": 2.0}
    metrics = {"buffer/drawn": 27.0, **groups, "rollout/accuracy": 0.412, "rollout/response_length_mean": 3100.0}
    metrics |= {"batch/staleness_mean": 0.71, "actor/loss": -0.0123, "perf/step_s": 60.0}
    assert progress_line(12, 110, metrics, repeated=31) == (
        "step 12/110 · groups 16/27 mixed (8 all-0, 3 all-1, 2 unscorable) · acc 0.41 · len 3.1k · staleness 0.7 · "
        "loss -0.012 · 60.0 s · ETA 1h38m · 31 warnings repeated"
    )
    assert progress_line(12, 110, {"rollout/accuracy": math.nan}, repeated=1) == (
        "step 12/110 · acc nan · 1 warning repeated"
    )


def test_an_example_shows_prompt_answer_and_score_in_bounds() -> None:
    group = make_group(7, [1.0, 0.0])
    long = replace(group.responses[0], text="1 + 6\n" * 20 + "x" * 5000 + "\nAnswer: 7")
    score = replace(group.scores[0], prediction="7")
    found = example(replace(group, responses=(long, group.responses[1]), scores=(score, group.scores[1])))
    lines = found.splitlines()
    assert lines[:4] == [
        *("a prompt as the model gets it, 3 tokens:", "  | 7", "one of its 2 answers, 4 tokens (stop):", "  | 1 + 6")
    ]
    assert lines[-2:] == ["  | Answer: 7", "its score: accuracy 1, reward 1, read as '7'; the reference answer: '7'"]
    assert len(found) < 1500 and len(lines) < 30 and "…" in found


class FullDisk(io.RawIOBase):
    """A file that takes `room` more bytes."""

    def __init__(self, logger: MetricsLogger, room: int) -> None:
        self.file, self.room = logger._file.detach(), room
        logger._file = io.BufferedWriter(self, BUFFER_BYTES)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = min(self.room, len(data))
        self.room -= taken
        return self.file.write(data[:taken])


@pytest.mark.parametrize("room", [0, 7, 30, 64])
def test_lines_that_a_full_disk_refuses_are_written_when_it_has_room(tmp_path, room, capsys) -> None:
    logger = MetricsLogger(tmp_path)
    logger.log(1, {"a": 1})
    disk = FullDisk(logger, room)
    for step in range(2, 6):
        logger.log(step, {"a": step})
    waiting = logger.unwritten()
    whole = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert whole + [json.loads(line)["step"] for line in waiting] == [1, 2, 3, 4, 5]
    disk.room = 10**6
    logger.log(6, {"a": 6})
    assert logger.unwritten() == () and steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]
    disk.room = 3
    logger.log(7, {"a": 7})
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 2, "once per outage"
    assert "metrics.jsonl" in errors[0] and "No space left" in errors[0]
    logger.resume(2)
    assert steps_in(tmp_path) == [1, 2] and logger.unwritten() == (), "what waits and is later is forgotten"
    logger.close()


def test_a_line_that_waits_is_part_of_the_state_and_written_once(tmp_path) -> None:
    first = MetricsLogger(tmp_path)
    first.log(1, {"a": 1})
    FullDisk(first, 4)
    first.log(2, {"a": 2})
    first.log(3, {"a": 3})
    due = first.unwritten()
    first.close()
    for _ in range(2):
        second = MetricsLogger(tmp_path)
        second.resume(2, due)
        second.close()
        assert steps_in(tmp_path) == [1, 2]


def test_lines_wait_for_a_file_that_cannot_be_opened(tmp_path, monkeypatch) -> None:
    logger = MetricsLogger(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(logger, "_opened", lambda: (tmp_path / "gone" / "metrics.jsonl").open("ab"))
        logger.resume(2, ['{"step": 1, "a": 1}', '{"step": 2, "a": 2}'])
    assert len(logger.unwritten()) == 2
    logger.log(3, {"a": 3})
    logger.close()
    assert steps_in(tmp_path) == [1, 2, 3] and logger.unwritten() == ()


def test_tensorboard_files_that_fail_end_no_run_and_are_told_once(tmp_path, monkeypatch, capsys) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.summary.writer.record_writer import RecordWriter

    logger = MetricsLogger(tmp_path, [TensorBoard(tmp_path)])
    logger.resume(0)
    logger.log(1, {"a": 1})

    def full(self, *_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "flush", full)
        patch.setattr("threading.excepthook", lambda args: None)
        for step in (2, 3, 4):
            logger.log(step, {"a": step})
            logger.text(step, "sample/0", "text")
    logger.log(5, {"a": 5})
    logger.close()
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]
    [error] = capsys.readouterr().err.strip().splitlines()
    assert "TensorBoard" in error and "No space left" in error
    files = (tmp_path / "tensorboard" / tmp_path.name).iterdir()
    events = [each for file in files for each in EventFileLoader(str(file)).Load()]
    assert {1, 5} <= {each.step for each in events if each.summary.value}


def test_whether_a_step_was_evaluated(tmp_path) -> None:
    assert not evaluated(tmp_path, 5)
    for lines, expected in (
        ('{"step": 4, "eval/accuracy": 1}\n{"step": 5, "actor/loss": 1}\n', False),
        ('{"step": 5, "actor/loss": 1}\n{"step": 5, "eval/accuracy": null}\n', True),
        ('{"step": 5, "eval/accuracy": 1', False),
    ):
        (tmp_path / "metrics.jsonl").write_text(lines)
        assert evaluated(tmp_path, 5) is expected
