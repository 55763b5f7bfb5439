"""What is logged can be read again, by us and by TensorBoard, also after a crash and a resume."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dapo.report.log import MetricsLogger, evaluated, progress_line, read_metrics
from dapo.report.sinks.events import TensorBoard


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def tensorboard_of(path: Path):  # type: ignore[no-untyped-def]
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    reader = EventAccumulator(str(path / "tensorboard"), size_guidance={TENSORS: 0})
    return reader.Reload()


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
    read = read_metrics(tmp_path / "metrics.jsonl")
    assert read[0]["rollout/accuracy"] == 0.5 and math.isnan(read[0]["actor/loss"])


@pytest.mark.parametrize(
    ("step", "left"),
    [
        pytest.param(0, [], id="nothing-saved"),
        pytest.param(2, [0, 1, 2, 2], id="middle"),
        pytest.param(9, [0, 1, 2, 2, 3], id="beyond"),
    ],
)
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


def test_resuming_completes_a_last_line_without_its_end(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    logger = MetricsLogger(tmp_path)
    logger.resume(2)
    logger.log(3, {})
    logger.close()
    assert steps_in(tmp_path) == [1, 2, 3]


def test_tensorboard_reads_scalars_and_texts(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, [TensorBoard(tmp_path)])
    logger.log(1, {"rollout/accuracy": 0.25, "actor/loss": math.nan})
    logger.log(2, {"rollout/accuracy": 0.5})
    logger.text(2, "sample/0", "**prompt** 1+1 = \ud800?")
    reader = tensorboard_of(tmp_path)  # before close: a live run can be watched
    assert [(event.step, event.value) for event in reader.Scalars("rollout/accuracy")] == [(1, 0.25), (2, 0.5)]
    (text,) = reader.Tensors("sample/0/text_summary")
    assert (text.step, text.tensor_proto.string_val[0]) == (2, b"**prompt** 1+1 = ??")
    assert reader.SummaryMetadata("sample/0/text_summary").plugin_data.plugin_name == "text"
    logger.close()


@pytest.mark.parametrize(
    ("step", "left"),
    [
        pytest.param(0, [(1, 10.0)], id="from-the-start"),
        pytest.param(2, [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)], id="from-a-checkpoint"),
        pytest.param(4, [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0)], id="where-it-ended"),
    ],
)
def test_tensorboard_shows_no_step_twice(step: int, left: list[tuple[int, float]], tmp_path: Path) -> None:
    first = MetricsLogger(tmp_path, [TensorBoard(tmp_path)])
    first.resume(0)
    for logged in range(5):
        first.log(logged, {"a": logged})
    time.sleep(1.01 - time.time() % 1)  # event files are read in the order of the second that their names begin with
    second = MetricsLogger(tmp_path, [TensorBoard(tmp_path)])  # the first one was killed: nothing closed it
    second.resume(step)
    second.log(step + 1, {"a": 10 * (step + 1)})
    scalars = tensorboard_of(tmp_path).Scalars("a")
    assert [(event.step, event.value) for event in scalars] == left
    first.close()
    second.close()


def test_without_tensorboard_nothing_of_it_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from dapo.report.log import MetricsLogger; "
        "logger = MetricsLogger(pathlib.Path(sys.argv[1])); logger.resume(0); "
        "logger.log(1, {'a': 1.0}); assert not {'torch', 'tensorboard', 'ray'} & set(sys.modules), 'a heavy import'"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


FULL = {
    "buffer/drawn": 27.0,
    "buffer/mixed": 16.0,
    "buffer/all_wrong": 8.0,
    "buffer/all_correct": 3.0,
    "buffer/unscorable": 0.0,
    "rollout/accuracy": 0.412,
    "rollout/response_length_mean": 31.2,
    "actor/loss": -0.0123,
    "perf/step_s": 1.9,
}


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        pytest.param(
            FULL,
            "step 12/110 · groups 16/27 mixed (8 all-0, 3 all-1) · acc 0.41 · len 31 · loss -0.012 · 1.9 s · ETA 3m",
            id="all-of-it",
        ),
        pytest.param(
            FULL | {"buffer/unscorable": 2.0, "rollout/response_length_mean": 3100.0, "perf/step_s": 60.0},
            "step 12/110 · groups 16/27 mixed (8 all-0, 3 all-1, 2 unscorable) · acc 0.41 · len 3.1k · loss -0.012 · "
            "60.0 s · ETA 1h38m",
            id="unscorable-and-long",
        ),
        pytest.param({"batch/staleness_mean": 0.0, "perf/step_s": 1.0}, "step 12/110 · 1.0 s · ETA 2m", id="on-policy"),
        pytest.param({"batch/staleness_mean": 0.71}, "step 12/110 · staleness 0.7", id="older policies"),
        pytest.param({"perf/step_s": 0.5}, "step 12/110 · 0.5 s · ETA 49s", id="seconds"),
        pytest.param({"perf/step_s": 3600.0}, "step 12/110 · 3600.0 s · ETA 4d02h", id="days"),
        pytest.param({"rollout/accuracy": math.nan}, "step 12/110 · acc nan", id="nothing-scored"),
        pytest.param({}, "step 12/110", id="nothing"),
    ],
)
def test_progress_line(metrics: dict[str, float], line: str) -> None:
    assert progress_line(12, 110, metrics) == line
    assert progress_line(12, 110, metrics, repeated=1) == f"{line} · 1 warning repeated"
    assert progress_line(12, 110, metrics, repeated=31) == f"{line} · 31 warnings repeated"


class FullDisk:
    """A file that takes `room` more bytes."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = min(self.room, len(data))
        self.room -= taken
        return self.file.write(data[:taken])

    def close(self) -> None:
        self.file.close()


@pytest.mark.parametrize("room", [0, 7, 30, 64])
def test_lines_that_a_full_disk_refuses_are_written_when_it_has_room(tmp_path, room, capsys) -> None:
    logger = MetricsLogger(tmp_path)
    logger.log(1, {"a": 1})
    logger._file = disk = FullDisk(logger._file, room)  # type: ignore[assignment]
    for step in range(2, 6):
        logger.log(step, {"a": step})
    waiting = logger.unwritten()
    assert steps_in_whole_lines(tmp_path) + [json.loads(line)["step"] for line in waiting] == [1, 2, 3, 4, 5]
    disk.room = 10**6
    logger.log(6, {"a": 6})
    assert logger.unwritten() == () and steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]
    disk.room = 0
    logger.log(7, {"a": 7})
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 2, "once per outage"
    assert "metrics.jsonl" in errors[0] and "No space left" in errors[0]
    logger.close()


def steps_in_whole_lines(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path / "metrics.jsonl")]


def test_of_too_many_lines_that_wait_the_oldest_are_lost_and_none_is_broken(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("dapo.report.log.MAX_WAITING", 3)
    logger = MetricsLogger(tmp_path)
    logger._file = disk = FullDisk(logger._file, 5)  # type: ignore[assignment]
    for step in range(1, 8):
        logger.log(step, {})
    assert len(logger.unwritten()) == 3
    disk.room = 10**6
    logger.log(8, {})
    assert steps_in(tmp_path) == [1, 7, 8]


def test_a_line_that_waits_is_part_of_the_state_and_written_once(tmp_path) -> None:
    first = MetricsLogger(tmp_path)
    first.log(1, {"a": 1})
    first._file = FullDisk(first._file, 4)  # type: ignore[assignment]
    first.log(2, {"a": 2})
    first.log(3, {"a": 3})
    due = first.unwritten()
    first.close()
    for _ in range(2):
        second = MetricsLogger(tmp_path)
        second.resume(2, due)
        second.close()
        assert steps_in(tmp_path) == [1, 2]


def test_a_logger_may_go_on_from_an_earlier_step_itself(tmp_path) -> None:
    """The run recovers within the process; what waits for the disk and is later is forgotten as well."""
    logger = MetricsLogger(tmp_path, [TensorBoard(tmp_path)])
    logger.resume(0)
    for step in range(1, 5):
        logger.log(step, {"a": step})
    logger._file = FullDisk(logger._file, 3)  # type: ignore[assignment]
    logger.log(5, {"a": 5})
    logger.resume(2)
    logger.log(3, {"a": 30})
    assert steps_in(tmp_path) == [1, 2, 3] and logger.unwritten() == ()
    logger.close()
    assert [(event.step, event.value) for event in tensorboard_of(tmp_path).Scalars("a")] == [(1, 1), (2, 2), (3, 30)]


def test_a_file_that_cannot_be_read_ends_no_run(tmp_path, capsys, monkeypatch) -> None:
    logger = MetricsLogger(tmp_path)
    logger.log(1, {})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_, **__: open("/no/such"))
        logger.resume(1)
    assert "metrics.jsonl" in capsys.readouterr().err
    logger.log(2, {})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'


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
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and "TensorBoard" in errors[0] and "No space left" in errors[0]
    # Files of the same second are read in the order of their names, where 10 comes before 9.
    events = [each for file in (tmp_path / "tensorboard").iterdir() for each in EventFileLoader(str(file)).Load()]
    assert {1, 5} <= {each.step for each in events if each.summary.value}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param(None, False, id="no file"),
        pytest.param('{"step": 4, "eval/accuracy": 1}\n{"step": 5, "actor/loss": 1}\n', False, id="another step"),
        pytest.param('{"step": 5, "actor/loss": 1}\n{"step": 5, "eval/accuracy": null}\n', True, id="evaluated"),
        pytest.param('{"step": 5, "eval/accuracy": 1', False, id="torn"),
    ],
)
def test_whether_a_step_was_evaluated(tmp_path, lines, expected) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines)
    assert evaluated(tmp_path, 5) is expected
