"""What is said between two step lines, and when: the real trainer and stream, a clock that the test moves."""

import asyncio
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from dapo.measure import clock as clock_module
from dapo.measure.clock import PhaseClock
from dapo.report import console, watchdog
from dapo.report.progress import GENERATING, Moment, Progress, line_of, moment_of
from dapo.report.watchdog import Watchdog, waiting
from dapo.sampling import traffic as traffic_module
from dapo.sampling.traffic import Traffic
from tests.support.driver.loops import make_trainer, some_mixed, tiny_config
from tests.support.fakes import FakeActors, FakeRewards
from tests.support.faulty_pools import EndlessRollouts, NarrowRollouts, make_stream, run, turns

EVERY_S = 60.0
MOMENT = Moment(
    step=17,
    total_steps=80,
    phase=GENERATING,
    phase_s=42.0,
    usable=9,
    wanted=16,
    dropped=4,
    running=202,
    ended=310,
    per_s=5120.0,
    longest_s=41.4,
    evaluation=None,
)


class Clock:
    """Stands for `time` where the trainer's parts take it from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (clock_module, traffic_module, console, watchdog):
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(console, "_printed_at", -math.inf)  # the tests before have printed, by another clock

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("changes", "left", "line"),
    [
        pytest.param(
            {},
            "~30s left",
            "in step 17/80 · generating for 42s · ~30s left · groups 9/16 usable, 4 to be dropped · "
            "responses 310 done, 202 running · 5.1k tokens/s · longest 41s",
            id="a batch",
        ),
        pytest.param(
            {"phase_s": 0.2, "usable": 0, "dropped": 0, "ended": 0, "per_s": 0.0, "running": 64, "longest_s": 0.2},
            "",
            "in step 17/80 · generating · groups 0/16 usable, 0 to be dropped · "
            "responses 0 done, 64 running · longest 0s",
            id="its begin",
        ),
        pytest.param(
            {"phase": "scoring", "running": 0},
            "",
            "in step 17/80 · scoring for 42s · groups 9/16 usable, 4 to be dropped · responses 310 done, 0 running · "
            "5.1k tokens/s",
            id="its end",
        ),
        pytest.param(
            {"phase": "updating", "phase_s": 200.0, "running": 0, "evaluation": (16, 340, 2048)},
            "",
            "in step 17/80 · updating for 3m · eval of step 16 340/2048 answers",
            id="nothing is generated but answers of an evaluation",
        ),
        pytest.param(
            {"phase": "updating", "phase_s": 5.0, "usable": 2, "dropped": 0},
            "",
            "in step 17/80 · updating for 5s · groups 2/16 usable, 0 to be dropped · responses 310 done, 202 running · "
            "5.1k tokens/s · longest 41s",
            id="the next batch is generated meanwhile",
        ),
    ],
)
def test_a_line(changes: dict, left: str, line: str) -> None:
    assert line_of(replace(MOMENT, **changes), left) == line


class Slow(FakeActors):
    """Takes some turns for everything."""

    async def update(self, batch):
        await turns(20)
        return await super().update(batch)

    async def save(self, directory, version):
        await turns(20)
        await super().save(directory, version)


class SlowRewards(FakeRewards):
    async def score(self, prompt, sample, response):
        await turns(30)
        return await super().score(prompt, sample, response)


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_phase_of_a_run_is_told_and_no_response_is_lost(tmp_path, clock: Clock, staleness: int) -> None:
    cfg = tiny_config(total_steps=5)
    cfg.filter_groups.max_staleness = staleness
    cfg.checkpoint.async_save = False

    class Counted(NarrowRollouts):
        """background: responses of evaluations."""

        background = 0

        async def generate(self, key, prompt, sampling, seeds, **how):
            aside = sampling.n if key.startswith("eval") else 0
            self.background += aside
            try:
                async for each in super().generate(key, prompt, sampling, seeds):
                    self.background -= bool(aside)
                    aside -= bool(aside)
                    yield each
            finally:
                self.background -= aside

    rollouts = Counted(max_turns=40)
    trainer, _ = make_trainer(tmp_path, cfg, rollouts=rollouts, actors=Slow())
    object.__setattr__(trainer._pools, "rewards", SlowRewards(some_mixed))
    trainer.stream._rewards = trainer._pools.rewards
    sync = trainer._pools.sync_weights

    async def slow_sync(version: int) -> None:
        await turns(20)
        await sync(version)

    object.__setattr__(trainer._pools, "sync_weights", slow_sync)
    seen: list[Moment] = []

    async def watched() -> None:
        task = asyncio.create_task(trainer.run())
        while not task.done():
            clock.now += 0.5
            seen.append(moment := moment_of(trainer, 5, clock.now))
            assert moment.running == rollouts.running - rollouts.background
            line_of(moment)
            await asyncio.sleep(0)
        task.result()

    run(watched())
    phases = {moment.phase for moment in seen}
    assert phases >= {GENERATING, "scoring", "updating", "syncing weights", "saving", "evaluating"}
    assert (seen[0].phase, seen[0].phase_s) == ("preparing", 0.0) and "in step 1/5 · preparing" == line_of(seen[0])
    assert [moment.step for moment in seen] == sorted(moment.step for moment in seen)
    assert {moment.step for moment in seen} == {1, 2, 3, 4, 5} and seen[-1].running == 0
    assert {moment.evaluation[0] for moment in seen if moment.evaluation} == {0, 2, 4, 5}
    full = [moment.evaluation for moment in seen if moment.evaluation and moment.evaluation[1] > 0]
    assert full and all(came <= total == 10 for _, came, total in full)
    assert any(moment.phase == "updating" and moment.running for moment in seen) == bool(staleness)
    assert all(moment.longest_s > 0 for moment in seen if moment.running and moment.phase_s > 20)
    assert any(later.ended < earlier.ended for earlier, later in pairwise(seen)), "a step counts anew"
    assert trainer.clock.since == {}


def test_a_group_that_is_cancelled_runs_no_more(clock: Clock) -> None:
    traffic = Traffic()
    traffic.start("a", 2)
    clock.now += 5
    traffic.start("b", 4)
    clock.now += 1
    traffic.end("b", 7)
    assert (traffic.running, traffic.ended, traffic.tokens, traffic.longest_s(clock.now)) == (5, 1, 7, 6.0)
    for _ in range(2):
        traffic.end("a", 1)
    assert (traffic.running, traffic.longest_s(clock.now)) == (3, 1.0), "only its verdicts are waited for"
    traffic.open()
    traffic.close("b")
    assert (traffic.running, traffic.ended, traffic.tokens, traffic.longest_s(clock.now)) == (0, 0, 0, 0.0)


class Some(EndlessRollouts):
    """Three groups end; a group's responses have 3 to 9 tokens."""

    first = 3


@contextmanager
def collecting(clock: Clock, version: int = 6) -> Iterator[tuple[SimpleNamespace, Callable[[], None]]]:
    """What a Progress needs of a trainer whose stream has collected all that it can get, and what ends the step."""
    with asyncio.Runner() as loop:
        stream = make_stream(Some(), FakeRewards(some_mixed))
        stream.buffer.serving(version)

        async def start() -> asyncio.Task:
            task = asyncio.create_task(stream.collect())
            await turns(200)
            return task

        async def end(task: asyncio.Task) -> None:
            task.cancel()
            stream._rollouts._stop.update(stream._running)
            await asyncio.wait([task])
            await stream.close()

        task = loop.run(start())
        try:
            evaluations = SimpleNamespace(progress=lambda: None)
            yield (
                SimpleNamespace(stream=stream, clock=PhaseClock(), evaluations=evaluations),
                lambda: stream.buffer.serving(stream.buffer.version + 1),
            )
        finally:
            loop.run(end(task))
        assert stream.traffic.running == 0 and stream.traffic.longest_s(clock.now) == 0.0


@contextmanager
def shown(lines: list[str]):
    yield lines.append


def test_without_a_terminal_a_long_step_has_a_line_a_minute(clock: Clock, capsys: pytest.CaptureFixture) -> None:
    """The watchdog, which a silence of a minute lets speak, has nothing to add."""
    silence = 0.0
    with collecting(clock) as (trainer, next_step), waiting("engine 3", silent=lambda: silence):
        progress = Progress(80, EVERY_S)
        dog = Watchdog(EVERY_S, before=progress.look)

        def after(seconds: float) -> list[str]:
            clock.now += seconds
            capsys.readouterr()
            dog.look()
            return re.sub(r"\d+ running", "N running", capsys.readouterr().out).splitlines()

        with progress:
            console.say("ready")
            assert progress.of(trainer) is trainer
            assert after(1) == [] and after(58) == []
            [line] = after(1)  # a minute after the last line, and 59 s after the first look
            assert re.fullmatch(
                r"in step 7/80 · generating for 60s · batch in ~60s · groups 2/4 usable, 1 to be dropped · "
                r"responses 12 done, N running · [01] tokens/s · longest 60s",
                line,
            )
            assert after(59) == []
            console.say("a checkpoint was written")
            assert after(1)[0].startswith("in step 7/80 · generating for 2m"), "whatever else is printed"
            silence = 60.0
            assert [line.split()[0] for line in (*after(30), *after(30))] == ["waiting", "in"]
            silence = 0.0
            next_step()
            console.say("step 7/80")
            assert after(1) == [] and after(58) == []
            assert [line[:9] for line in after(1)] == ["in step 8"]
        assert not [line for line in after(600) if "step" in line], "the run is over"


def test_on_a_terminal_every_look_is_shown_and_nothing_is_printed(clock: Clock) -> None:
    lines: list[str] = []
    said: list[str] = []
    with collecting(clock) as (trainer, next_step):
        dog = Watchdog(EVERY_S)
        dog._began = clock.now
        with Progress(8, EVERY_S, say=said.append, live=lambda: shown(lines)) as progress:
            progress.of(trainer)
            for _ in range(200):
                clock.now += 1
                progress.look(clock.now)
                with waiting("something new"):
                    assert dog.due(clock.now) == [], "the line in place breaks every silence"
            rates = [int(re.search(r"(\d+) tokens/s", line)[1]) for line in lines[:4]]
            assert rates == [round(rates[0] / seconds) for seconds in (1, 2, 3, 4)] and rates[0] > 12
            assert len(lines) == 200 and lines[-1].startswith("in step 7/8 · generating for 3m · batch in ~3m")
            next_step()
            clock.now += 0.5
            progress.look(clock.now)
            assert lines[-1].startswith("in step 8/8 · generating for 3m · ~3m left"), "as long as the one before"
            clock.now += 300
            progress.look(clock.now)
            assert "left" not in lines[-1] and "batch in ~8m" in lines[-1], "longer than expected"
            progress.of(trainer)  # the actors were lost
            clock.now += 1
            progress.look(clock.now)
            assert lines[-1].startswith("in step 8/8"), lines[-1]
        shown_so_far = len(lines)
        progress.look(clock.now)
        assert len(lines) == shown_so_far and said == []


class Changing:
    """A table that changes while it is read, the first time."""

    def __init__(self) -> None:
        self.read = 0

    def keys(self) -> list[str]:
        self.read += 1
        if self.read == 1:
            raise RuntimeError("dictionary changed size during iteration")
        return []


def test_a_look_that_another_thread_spoils_is_left_out(clock: Clock) -> None:
    lines: list[str] = []
    with collecting(clock) as (trainer, _), Progress(8, EVERY_S, live=lambda: shown(lines)) as progress:
        trainer.clock = SimpleNamespace(since=Changing())
        progress.of(trainer)
        for count in (0, 1):
            clock.now += 1
            progress.look(clock.now)
            assert len(lines) == count


def test_a_step_is_expected_to_take_as_long_as_the_last_whole_ones(clock: Clock) -> None:
    lines: list[str] = []
    with (
        collecting(clock, version=0) as (trainer, next_step),
        Progress(80, EVERY_S, live=lambda: shown(lines)) as progress,
    ):
        progress.of(trainer)

        def after(seconds: float, steps: int = 1) -> str:
            clock.now += seconds
            progress.look(clock.now)
            for _ in range(steps):
                next_step()
            progress.look(clock.now)
            return lines[-1]

        assert " left" not in after(1, steps=0), "the first one"
        assert " left" not in after(50, steps=2), "how long each of them took was not seen"
        assert "~30s left" in after(30) and "~45s left" in after(60)
        assert [after(10) for _ in range(5)] and "~10s left" in lines[-1], "of those before, none counts any more"
        assert lines[-1].startswith("in step 10/80")
        assert "batch in ~" in after(300, steps=0), "it takes longer"
        with trainer.clock("update"):
            assert "batch in" not in after(1, steps=0), "what waits is of the next one"
        with trainer.clock("reference"):
            assert "· asking the reference policy ·" in after(0, steps=0)
        trainer.stream.buffer.progress = lambda: (4, 4, 1)
        assert "batch in" not in after(1, steps=0), "it is full"
