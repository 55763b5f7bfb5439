"""The page about one GPU: which rows, within the minutes, the reason where a figure is missing, and all on a CPU."""

import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dapo.config.compose import compose
from dapo.config.facts.model_shape import read_shape
from dapo.config.plan import PlannedConfig
from dapo.tools.bench import device, gpu
from dapo.tools.bench.__main__ import main, parse
from dapo.tools.bench.alone import Row, alone
from dapo.tools.plan.actor import ActorMemory
from tests.support import asleep
from tests.tools.bench.test_commands import tables

H200 = {"device": "NVIDIA H200", "memory": 150.1e9, "torch": "2.11.0"}
TINY = "pkg://dapo.tiny/base"


def plan(words: Sequence[str]) -> float:
    """Stands for `gpu.planned`, which asks a process: 17 bytes a parameter, and more where less is freed."""
    said = dict(word.split("=") for word in words)
    kept = {"full": 0, "selective": 1e-5, "none": 6e-5}[said["model.gradient_checkpointing"]]
    more = 1 + kept * int(said["actor.max_tokens_per_gpu"]) + (said["actor.reshard_after_forward"] == "false") / 2
    return 17 * read_shape(said["model.path"]).parameters * more


def chosen(memory: float, *words: str) -> dict[str, gpu.Job]:
    return {job.name: job for job in gpu.jobs(parse(["gpu", *words]), H200 | {"memory": memory}, plan)}


def test_the_plan_is_asked_by_command() -> None:
    words = device.arguments("cuda", "Qwen/Qwen2.5-7B", [20_480])
    cfg = compose([*words, "plan.overhead_bytes=0"], experiment="dapo_tiny", plan=True)
    assert isinstance(cfg, PlannedConfig)
    peak = ActorMemory(cfg, read_shape(cfg.model.path)).peak()
    [slots] = [term.amount for term in peak.terms if term.name.startswith("slots")]
    assert gpu.planned(words) == pytest.approx(peak.total - slots, rel=1e-3)


def test_what_does_not_fit_says_so_and_levers_are_tried_where_they_fit() -> None:
    large, small = chosen(150.1e9), chosen(85e9)
    assert [(name.removeprefix("updates Qwen2.5-"), job.unfit) for name, job in large.items() if job.unfit] == [
        ("7B: compile + selective", (20_480,)),
        ("7B: selective", (20_480,)),
        ("7B: no checkpointing", (4096, 20_480)),
        ("7B: no resharding", (4096, 20_480)),
    ]
    assert {"updates Qwen2.5-7B: compile", "updates Qwen2.5-1.5B: selective"} <= large.keys()
    assert "updates Qwen2.5-1.5B: float32 head" not in large
    assert small["updates Qwen2.5-7B: base"].why and not small["updates Qwen2.5-1.5B: no checkpointing"].why
    assert gpu.TURNS in large["engine Qwen2.5-7B"].tables and gpu.TURNS not in small["engine Qwen2.5-7B"].tables
    assert large["updates Qwen2.5-7B: fa3"].why.startswith("not installed")


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fills a page on a clock of its own: a process takes half of what is expected, and `broken` ones fail."""
    clock = types.SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(gpu, "time", clock)
    monkeypatch.setattr(gpu, "random_model", lambda model, path: (path.mkdir(parents=True), path)[1])

    def fill(*words: str, broken: Sequence[str] = ()) -> tuple[str, list[str]]:
        given = parse(["gpu", "--output", str(tmp_path / "gpu.md"), *words])
        page, ran = gpu.Page(Path(given.output), H200), []

        def process(work: Any, path: str, *given: Any, timeout_s: float) -> Iterator[Row]:
            [job] = [job for job in waiting if (job.work, job.given) == (work, given)]
            ran.append(job.name)
            clock.now += job.seconds / 2
            if job.name in broken:
                clock.now += timeout_s
                raise RuntimeError("not done | in time")
            for tokens in (4096, 20_480) if job.tables == (gpu.UPDATES,) else ():
                yield {"tokens": tokens, "seconds": 1.0, "tokens_per_s": 4e3, "mfu": 0.25, "peak_bytes": 9e9}

        monkeypatch.setattr(gpu, "alone", process)
        waiting = [job for job in gpu.jobs(given, H200, plan) if job.name not in page.took]
        gpu.fill(page, waiting, tmp_path / "weights", clock.now + 60 * given.minutes)
        return (tmp_path / "gpu.md").read_text(), ran

    return fill


def test_rows_end_within_the_minutes_and_a_second_call_goes_on(filled: Any) -> None:
    broken = "updates Qwen2.5-0.5B: base"
    text, ran = filled("--minutes", "8", broken=[broken])
    updates, left = tables(text)[1], text.partition("## Left out")[2]
    assert ran[:2] == [broken, "updates Qwen2.5-7B: base"] and f"- {ran[1]}" not in left
    assert updates[1] == {
        **{"model": "Qwen2.5-7B", "setting": "base", "tokens": "4,096", "s": "1.00", "tokens/s": "4,000"},
        **{"MFU": "25.0%", "peak GB": "9.00", "planned GB": updates[1]["planned GB"]},
    }
    assert float(updates[1]["planned GB"]) == pytest.approx(17 * 7.615616512, abs=0.01)
    assert "- updates Qwen2.5-7B: selective: expected" in left
    [failed] = [row for row in updates if (row["model"], row["setting"]) == ("Qwen2.5-0.5B", "base")]
    assert [failed[name] for name in ("tokens", "s", "MFU", "peak GB")] == ["not done / in time", "–", "–", "–"]
    later, again = filled("--minutes", "30")
    assert set(again) & set(ran) == {broken} and "## Left out" not in later
    assert sum((row["model"], row["setting"]) == ("Qwen2.5-0.5B", "base") for row in tables(later)[1]) == 2


def test_work_alone_ends_with_its_reason_or_in_time() -> None:
    rows = []
    with pytest.raises(RuntimeError, match="^ValueError: the first line$"):
        rows.extend(alone(asleep.work, 0, timeout_s=100))  # keeps what came before
    assert rows == [{"began": True}]
    with pytest.raises(RuntimeError, match="^not done in 1 s$"):
        list(alone(asleep.work, 100, timeout_s=1))


@pytest.mark.ray
@pytest.mark.nightly
def test_the_whole_page_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling takes minutes
    page = tmp_path / "gpu.md"
    words = f"--device cpu --models {TINY} --minutes 15 --tokens 192 256 --answers 16 32 --requests 8 4 --output {page}"
    main(["gpu", *words.split()])
    head, updates, generation, turns = tables(page.read_text())
    assert {row["what"] for row in head} >= {"device", "torch", "transformers", "vLLM", "commit", "begun"}
    measured = [row for row in updates if row["s"] != "–"]
    assert {row["setting"] for row in measured} >= {"base", "selective", "no checkpointing", "no resharding"}
    assert [row["tokens"] for row in measured][:2] == ["192", "256"] and all(float(row["s"]) > 0 for row in measured)
    assert [(row["answer"], row["at once"]) for row in generation][:2] == [("16", "8"), ("32", "4")]
    assert float(turns[0]["GB/s"]) > 0
