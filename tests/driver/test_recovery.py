"""What ends a run and what does not, with fake trainers."""

import asyncio

import pytest

from dapo.driver.recovery import run_to_end
from dapo.ground import restarts
from dapo.pools import ActorsLost
from dapo.state.saving import SaveFailed
from tests.support.faulty_pools import lost


class Recorded:
    """A trainer and its saver at once; `ends` is what happens at the end of `run`."""

    behind, refuses_to_save, version = True, None, 1

    def __init__(self, events: list[str], number: int, ends: BaseException | None) -> None:
        self.saver = self
        self.events, self.number, self.ends = events, number, ends

    async def run(self) -> None:
        self.events.append(f"run {self.number}")
        if self.ends is not None:
            raise self.ends

    async def save(self) -> None:
        self.events.append(f"save {self.number}")
        if self.refuses_to_save is not None:
            raise self.refuses_to_save

    def is_behind(self, version: int) -> bool:
        return self.behind

    async def abandon(self) -> None:
        self.events.append(f"abandon {self.number}")

    def close(self) -> None:
        if f"close {self.number}" not in self.events:  # it may be called twice
            self.events.append(f"close {self.number}")


class Restarted:
    def __init__(self, events: list[str], *ends: Exception | None) -> None:
        self.events, self.ends = events, list(ends)

    async def restart(self) -> None:
        self.events.append("restart")
        if self.ends and (error := self.ends.pop(0)):
            raise error


def played(ends, restarts=(), max_restarts=3, change=lambda trainer: None) -> tuple[list[str], BaseException | None]:
    events: list[str] = []
    left = list(enumerate(ends))

    def make() -> Recorded:
        trainer = Recorded(events, *left.pop(0))
        change(trainer)
        return trainer

    try:
        asyncio.run(run_to_end(make, Restarted(events, *restarts), max_restarts))
    except BaseException as error:
        return events, error
    return events, None


def test_a_run_whose_actors_are_lost_goes_on_with_a_new_trainer(capsys):
    events, error = played([lost(1), lost(2), None])
    assert error is None
    assert events == [
        *("run 0", "abandon 0", "close 0", "restart"),
        *("run 1", "abandon 1", "close 1", "restart"),
        *("run 2", "close 2"),
    ], "the earlier one has left the journal before the next one reads it, and has saved nothing"
    told = capsys.readouterr()
    assert "start again (1 of 3 within an hour or without a new step): rank 1 is gone" in told.err
    assert "start again (2 of 3 within an hour or without a new step): rank 2 is gone" in told.err
    assert told.out.count("the actors are back") == 2


@pytest.mark.parametrize("allowed", [0, 2])
def test_restarts_are_bounded_and_the_error_says_why_and_what_helps(allowed):
    events, error = played([lost(number) for number in range(9)], max_restarts=allowed)
    assert isinstance(error, ActorsLost) and isinstance(error.__cause__, ActorsLost)
    assert events.count("restart") == allowed and events[-1] == f"close {allowed}"
    for word in (f"rank {allowed} is gone", f"{allowed} times", "`actor.max_restarts`", "newest checkpoint"):
        assert word in str(error)
    assert not [event for event in events if event.startswith("save")], "lost actors have nothing to save"


def test_a_restart_that_fails_counts_and_its_reason_is_told():
    refusals = [RuntimeError("no room on the GPU"), lost(7), RuntimeError("still no room")]
    events, error = played([lost(), None], refusals)
    assert events == ["run 0", "abandon 0", "close 0", *["restart"] * 3]
    assert isinstance(error, ActorsLost) and "still no room" in str(error) and "3 times" in str(error)
    events, error = played([lost(), None], refusals[:2])
    assert error is None and events == ["run 0", "abandon 0", "close 0", *["restart"] * 3, "run 1", "close 1"]


@pytest.mark.parametrize(
    ("apart", "versions", "restarted"),
    [
        pytest.param(3000.0, (1, 2, 3, 4, 5, 6), 1, id="within the hour"),
        pytest.param(3700.0, (1, 2, 3, 4, 5, 6), 5, id="later, and a step farther"),
        pytest.param(3700.0, (7, 7, 7, 7, 7, 7), 1, id="later, in the same step"),
        pytest.param(3700.0, (7, 5, 7, 6, 7, 7), 1, id="later, in steps that were trained before"),
    ],
)
def test_a_loss_counts_for_an_hour_and_until_another_step_is_trained(monkeypatch, apart, versions, restarted):
    now = [0.0]
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now[0])

    def later(trainer: Recorded) -> None:
        now[0] += apart
        trainer.version = versions[trainer.number]

    events, error = played([lost()] * 5 + [None], max_restarts=1, change=later)
    assert (error is None) == (restarted == 5) and events.count("restart") == restarted


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize(
    "error",
    [RuntimeError("an engine is gone"), ValueError("no such reward"), asyncio.CancelledError(), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_any_other_end_saves_what_no_checkpoint_holds_and_is_raised(error, behind):
    def as_told(trainer: Recorded) -> None:
        trainer.behind = behind

    events, raised = played([error], change=as_told)
    assert type(raised) is type(error) and str(raised) == str(error)
    assert events == ["run 0", *(["save 0"] if behind else []), "close 0"]
    assert played([None], change=as_told) == (["run 0", "close 0"], None)


@pytest.mark.parametrize("second", [SaveFailed("the disk is full"), lost()])
def test_a_save_at_the_end_that_fails_hides_no_error(capsys, second):
    def full(trainer: Recorded) -> None:
        trainer.refuses_to_save = second

    events, raised = played([RuntimeError("an engine is gone")], change=full)
    assert str(raised) == "an engine is gone" and events == ["run 0", "save 0", "close 0"]
    assert f"step 1 could not be saved: {second}" in capsys.readouterr().err
