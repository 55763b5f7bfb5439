"""What is logged can be read again, by us and by TensorBoard, also after a crash and a resume."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from dapo.report.log import MetricsLogger, progress_line, read_metrics


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def tensorboard_of(path: Path):  # type: ignore[no-untyped-def]
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    reader = EventAccumulator(str(path / "tensorboard"), size_guidance={TENSORS: 0})
    return reader.Reload()


def test_a_line_per_call_is_there_at_once(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, tensorboard=False)
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
@pytest.mark.parametrize("torn", ["", '{"step": 4, "a', '{"step": 99}', "4\n", "\n"])
def test_resuming_drops_what_is_later_or_torn(step: int, left: list[int], torn: str, tmp_path: Path) -> None:
    first = MetricsLogger(tmp_path, tensorboard=False)
    for logged in (0, 1, 2, 2, 3):
        first.log(logged, {"a": logged})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    second = MetricsLogger(tmp_path, tensorboard=False)
    second.resume(step)
    second.log(step + 1, {"a": 0})
    second.close()
    assert steps_in(tmp_path) == [*left, step + 1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resuming_completes_a_last_line_without_its_end(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    logger = MetricsLogger(tmp_path, tensorboard=False)
    logger.resume(2)
    logger.log(3, {})
    logger.close()
    assert steps_in(tmp_path) == [1, 2, 3]


def test_tensorboard_reads_scalars_and_texts(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, tensorboard=True)
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
    first = MetricsLogger(tmp_path, tensorboard=True)
    first.resume(0)
    for logged in range(5):
        first.log(logged, {"a": logged})
    second = MetricsLogger(tmp_path, tensorboard=True)  # the first one was killed: nothing closed it
    second.resume(step)
    second.log(step + 1, {"a": 10 * (step + 1)})
    scalars = tensorboard_of(tmp_path).Scalars("a")
    assert [(event.step, event.value) for event in scalars] == left
    first.close()
    second.close()


def test_without_tensorboard_nothing_of_it_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from dapo.report.log import MetricsLogger; "
        "logger = MetricsLogger(pathlib.Path(sys.argv[1]), tensorboard=False); logger.resume(0); "
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
