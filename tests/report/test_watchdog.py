"""What the watchdog says of which waits, and when: with a clock that the test moves, and in a thread of its own."""

import contextlib
import math
import time

import pytest

from dapo.report import console, watchdog
from dapo.report.watchdog import Member, Watchdog, waiting

EVERY_S = 60.0

pytestmark = pytest.mark.usefixtures("open_waits")


class Clock:
    """Stands for `time` in the watchdog's module and that of the lines; `told(seconds)` are those of the watchdog after
    so many more seconds."""

    def __init__(self) -> None:
        self.now = 5.0  # a machine that has just started: less than EVERY_S

    def monotonic(self) -> float:
        return self.now

    def told(self, seconds: float, *, quiet: bool = False) -> list[str]:
        """quiet: nothing else is printed meanwhile; else something was, just now."""
        self.now += seconds
        if not quiet:
            console.say("a step")
        return self.dog.due(self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watchdog, "time", made)
    monkeypatch.setattr(console, "time", made)
    monkeypatch.setattr(console, "_printed_at", -math.inf)
    made.dog = Watchdog(EVERY_S)
    return made


def ranks(numbers: list[int], count: int, act: str = "(the update)") -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for number in numbers:
        stack.enter_context(waiting(Member(role="actor rank", number=number, count=count, act=act)))
    return stack


def test_a_wait_is_told_once_it_is_long_and_again_after_as_long(clock: Clock) -> None:
    with waiting("the journal to be read"):
        assert clock.told(59) == []
        assert clock.told(1) == ["waiting 60 s for the journal to be read"]
        assert clock.told(59) == []
        assert clock.told(1) == ["waiting 120 s for the journal to be read"]
    assert clock.told(600, quiet=True) == []


def test_ranks_share_a_line_that_names_those_that_are_waited_for(clock: Clock) -> None:
    with ranks(list(range(64)), 64) as all_of_them:
        assert clock.told(60) == ["waiting 60 s for all 64 actor ranks (the update)"]
        with ranks([3, 17], 64, "(saving)"), ranks([5], 64, "(loading)"), ranks(list(range(20)), 64, "(the export)"):
            all_of_them.close()
            assert clock.told(60) == [
                "waiting 60 s for 2 of 64 actor ranks (saving): 3, 17",
                "waiting 60 s for actor rank 5 (loading)",
                f"waiting 60 s for 20 of 64 actor ranks (the export): {', '.join(map(str, range(16)))}, ...",
            ]


def test_an_engine_is_told_by_its_silence_with_what_it_does_and_by_its_age(clock: Clock) -> None:
    silence = {3: 0.0, 4: 0.0}

    def group(number: int):
        return waiting(
            Member(role="engine", number=number, count=8, act=""),
            lambda: f"4 requests, version 17, last token {silence[number]:.0f} s ago",
            silent=lambda: silence[number],
        )

    with group(3), group(3), group(4):
        assert clock.told(100) == [], "tokens come"
        silence[3] = 61.0
        assert clock.told(20) == ["waiting 120 s for engine 3: 4 requests, version 17, last token 61 s ago"]
        silence[4] = 80.0
        assert clock.told(60) == ["waiting 180 s for 2 of 8 engines: 3, 4"]


def test_waits_of_one_text_are_counted(clock: Clock) -> None:
    with waiting("reward workers", each="responses"):
        clock.now += 20
        with waiting("reward workers", each="responses"):
            assert clock.told(60) == ["waiting 80 s for reward workers: 2 responses, the oldest 80 s"]
        assert clock.told(60) == ["waiting 140 s for reward workers: 1 responses, the oldest 140 s"]


def test_a_long_silence_is_broken_by_the_oldest_wait_whatever_its_age(clock: Clock) -> None:
    done = 0
    clock.now += 50  # since the program began, or its last line
    with waiting("the batch of step 1", lambda: f"{done} of 4 groups"):
        clock.now += 1
        done = 3
        with waiting("an engine that serves", each="groups"):
            assert clock.told(8, quiet=True) == []
            assert clock.told(1, quiet=True) == ["waiting 10 s for the batch of step 1: 3 of 4 groups"]
            assert clock.told(55) == ["waiting 64 s for an engine that serves: 1 groups, the oldest 64 s"]
            assert clock.told(5) == ["waiting 70 s for the batch of step 1: 3 of 4 groups"], "60 s after its last line"
    with waiting("the evaluation"):
        assert clock.told(59, quiet=True) == []
        assert clock.told(1, quiet=True) == ["waiting 60 s for the evaluation"]


def test_the_thread_speaks_while_its_caller_is_held_up_and_ends_with_its_block(capsys: pytest.CaptureFixture) -> None:
    with Watchdog(0.05), waiting("a call that blocks", lambda: "so far"):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and capsys.readouterr().out.count("a call that blocks: so far") < 1:
            time.sleep(0.01)
        assert time.monotonic() < deadline
    with waiting("nobody hears it"):
        time.sleep(0.2)
    assert "nobody" not in capsys.readouterr().out


def test_a_line_of_anybody_counts_as_a_sign_of_life() -> None:
    for speak in (console.say, console.warn):
        before = time.monotonic()
        speak("a step")
        assert before <= console.printed_at() <= time.monotonic()
