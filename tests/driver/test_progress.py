"""What is said between two step lines, and when: the real stream, a clock that the test moves."""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dapo.driver.progress import GENERATING, Moment, Progress, line_of
from dapo.ground import console
from dapo.ground.clock import PhaseClock
from dapo.ground.watchdog import Watchdog, waiting
from dapo.sampling.stream import Traffic
from tests.support.clock import Clock
from tests.support.driver.loops import some_mixed
from tests.support.fakes import FakeRewards
from tests.support.faulty_pools import EndlessRollouts, make_stream, turns

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


def test_a_line() -> None:
    assert line_of(MOMENT, "~30s left") == (
        "in step 17/80 · generating for 42s · ~30s left · groups 9/16 usable, 4 to be dropped · "
        "responses 310 done, 202 running · 5.1k tokens/s · longest 41s"
    )
    updating = replace(MOMENT, phase="updating", phase_s=200.0, running=0, evaluation=(16, 340, 2048))
    assert line_of(updating, "") == "in step 17/80 · updating for 3m · eval of step 16 340/2048 answers"


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
                r"responses 12 done, N running · 12 tokens/s · longest 60s",
                line,
            )
            assert after(59) == []
            console.say("a checkpoint was written")
            assert after(1)[0].startswith("in step 7/80 · generating for 2m"), "whatever else is printed"
            silence = 60.0
            assert [line.split()[0] for line in (*after(30), *after(30))] == ["still", "in"]
            silence = 0.0
            next_step()
            console.say("step 7/80")
            assert after(1) == [] and after(58) == []
            assert [line[:9] for line in after(1)] == ["in step 8"]
        assert not [line for line in after(600) if "step" in line], "the run is over"


def test_on_a_terminal_every_look_is_shown_and_nothing_is_printed(clock: Clock) -> None:
    lines: list[str] = []
    said: list[str] = []
    with collecting(clock, version=0) as (trainer, next_step):
        dog = Watchdog(EVERY_S)
        dog._began = clock.now
        with Progress(80, EVERY_S, say=said.append, live=lambda: shown(lines)) as progress:
            assert lines.pop() == "starting"
            with waiting("Ray"), waiting("engine 0 to start"):
                clock.now += 2
                progress.look(clock.now)
            assert lines.pop() == "waiting for Ray, after 2 s · engine 0 to start, after 2 s"
            progress.of(trainer)

            def after(seconds: float, steps: int = 1) -> str:
                clock.now += seconds
                progress.look(clock.now)
                with waiting("something new"):
                    assert dog.due(clock.now) == [], "the line in place breaks every silence"
                for _ in range(steps):
                    next_step()
                progress.look(clock.now)
                return lines[-1]

            assert " left" not in after(1, steps=0), "the first one"
            assert " left" not in after(50, steps=2), "how long each of them took was not seen"
            assert "~30s left" in after(30) and "~45s left" in after(60)
            assert [after(10) for _ in range(5)] and "~10s left" in lines[-1], "of those before, none counts any more"
            assert lines[-1].startswith("in step 10/80") and all("12 tokens/s" in line for line in lines)
            assert "batch in ~" in after(300, steps=0) and "left" not in lines[-1], "longer than expected"
            progress.of(trainer)  # the actors were lost
            assert after(1, steps=0).startswith("in step 10/80")
            with trainer.clock("update"):
                assert "batch in" not in after(1, steps=0), "what waits is of the next one"
            with trainer.clock("reference"):
                assert "· asking the reference policy ·" in after(0, steps=0)
            trainer.stream.buffer.progress = lambda: (4, 4, 1)
            assert "batch in" not in after(1, steps=0), "it is full"
            progress.over()
            progress.look(clock.now)
            assert lines[-1] == "ending"
        so_far = len(lines)
        progress.look(clock.now)
        assert len(lines) == so_far and said == []


def test_a_terminal_that_goes_ends_neither_the_watch_nor_the_run(clock: Clock) -> None:
    @contextmanager
    def gone() -> Iterator[Callable[[str], None]]:
        def show(line: str) -> None:
            raise OSError(5, "Input/output error")

        yield show
        raise OSError(5, "Input/output error")

    with collecting(clock) as (trainer, _), Progress(8, EVERY_S, live=gone) as progress:
        progress.of(trainer)
        progress.look(clock.now)


def test_a_group_that_is_cancelled_runs_no_more(clock: Clock) -> None:
    traffic = Traffic()
    traffic.start("a", 2)
    clock.now += 5
    traffic.start("b", 4)
    clock.now += 1
    traffic.end("b")
    assert (traffic.running, traffic.ended, traffic.longest_s(clock.now)) == (5, 1, 6.0)
    for _ in range(2):
        traffic.end("a")
    assert (traffic.running, traffic.longest_s(clock.now)) == (3, 1.0), "only its verdicts are waited for"
    traffic.open()
    traffic.close("b")
    assert (traffic.running, traffic.ended, traffic.longest_s(clock.now)) == (0, 0, 0.0)
