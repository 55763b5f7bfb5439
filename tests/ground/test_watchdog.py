"""What the watchdog says of which waits, and when: with a clock that the test moves, and in a thread of its own."""

import contextlib
import time
from collections.abc import Callable

import pytest

from dapo.ground import console
from dapo.ground.watchdog import Member, Watchdog, waiting
from tests.support.clock import Clock

EVERY_S = 60.0
Told = Callable[..., list[str]]

pytestmark = pytest.mark.usefixtures("open_waits")


@pytest.fixture
def told(clock: Clock) -> Told:
    """What the watchdog says after so many more seconds. quiet: nothing else was printed just now."""
    clock.now = 5.0  # a machine that has just started: less than EVERY_S
    dog = Watchdog(EVERY_S)

    def after(seconds: float, *, quiet: bool = False) -> list[str]:
        clock.now += seconds
        if not quiet:
            console.say("a step")
        return dog.due(clock.now)

    return after


def ranks(numbers: list[int], act: str = "(the update)") -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for number in numbers:
        stack.enter_context(waiting(Member(role="actor rank", number=number, count=64, act=act)))
    return stack


def test_a_wait_is_told_once_it_is_long_and_again_after_as_long(told: Told) -> None:
    with waiting("the journal to be read"):
        assert told(59) == []
        assert told(1) == ["still waiting for the journal to be read, after 60 s"]
        assert told(59) == []
        assert told(1) == ["still waiting for the journal to be read, after 120 s"]
    assert told(600, quiet=True) == []
    with waiting("reward workers", each="responses"):
        assert told(20) == []
        with waiting("reward workers", each="responses"):
            assert told(60) == ["still waiting for reward workers, after 80 s: 2 responses, the oldest 80 s"]


def test_ranks_share_a_line_that_names_those_that_are_waited_for(told: Told) -> None:
    with ranks(list(range(64))) as all_of_them:
        assert told(60) == ["still waiting for all 64 actor ranks (the update), after 60 s"]
        with ranks([3, 17], "(saving)"), ranks([5], "(loading)"), ranks(list(range(20)), "(the export)"):
            all_of_them.close()
            assert told(60) == [
                "still waiting for 2 of 64 actor ranks (saving), after 60 s: 3, 17",
                "still waiting for actor rank 5 (loading), after 60 s",
                "still waiting for 20 of 64 actor ranks (the export), after 60 s: "
                f"{', '.join(map(str, range(16)))}, ...",
            ]


def test_an_engine_is_told_by_its_silence_and_not_by_its_age(told: Told) -> None:
    silence = {3: 0.0, 4: 0.0}

    def group(number: int):
        return waiting(
            Member(role="engine", number=number, count=8, act=""),
            lambda: f"4 requests, version 17, last token {silence[number]:.0f} s ago",
            silent=lambda: silence[number],
        )

    with group(3), group(3), group(4):
        assert told(100) == [], "tokens come"
        silence[3] = 61.0
        assert told(20) == ["still waiting for engine 3, after 120 s: 4 requests, version 17, last token 61 s ago"]
        silence[4] = 80.0
        assert told(60) == ["still waiting for 2 of 8 engines, after 180 s: 3, 4"]


def test_a_long_silence_is_broken_by_the_oldest_wait_whatever_its_age(told: Told) -> None:
    told(0)  # the last line of the program
    done = 0
    with waiting("the batch of step 1", lambda: f"{done} of 4 groups"):
        assert told(51, quiet=True) == []
        done = 3
        with waiting("an engine that serves", each="groups"):
            assert told(8, quiet=True) == []
            assert told(1, quiet=True) == ["still waiting for the batch of step 1, after 60 s: 3 of 4 groups"]
            assert told(51) == ["still waiting for an engine that serves, after 60 s: 1 groups, the oldest 60 s"]
            assert told(9) == ["still waiting for the batch of step 1, after 120 s: 3 of 4 groups"], (
                "60 s after its last line"
            )


def test_the_thread_speaks_while_its_caller_is_held_up_and_ends_with_its_block(capsys: pytest.CaptureFixture) -> None:
    with Watchdog(0.05), waiting("a call that blocks", lambda: "so far"):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and capsys.readouterr().out.count("a call that blocks, after") < 1:
            time.sleep(0.01)
        assert time.monotonic() < deadline
    with waiting("nobody hears it"):
        time.sleep(0.15)
    assert "nobody" not in capsys.readouterr().out
