"""What ends a run and what does not, with fake trainers; and whole runs on fake pools whose actors fail."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from dapo.driver.saving import SaveFailed
from dapo.faults import restarts
from dapo.faults.losses import unless_lost
from dapo.faults.recovery import run_to_end
from dapo.pools import ActorsLost, BatchRefused, Updated
from dapo.report.log import read_metrics
from dapo.state.quarantine import QUARANTINE, read_quarantined
from tests.sampling.test_stream import make_trainer, tiny_config
from tests.support.fakes import FakeActors, FakeRollouts


class Recorded:
    """A trainer and its saver at once, with `version` 1; `ends` is what happens at the end of `run`."""

    def __init__(self, events: list[str], number: int, ends: BaseException | None, *, behind: bool = True) -> None:
        self.version, self.saver = 1, self
        self.events, self.number, self.ends, self.behind = events, number, ends, behind
        self.refuses_to_save: Exception | None = None

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
    """Actors whose restarts end as they are told to."""

    def __init__(self, events: list[str], *ends: Exception | None) -> None:
        self.events, self.ends = events, list(ends)

    async def restart(self) -> None:
        self.events.append("restart")
        if self.ends and (error := self.ends.pop(0)):
            raise error


def lost(number: int = 1) -> ActorsLost:
    return ActorsLost(f"rank {number} is gone")


def played(
    ends: Sequence[BaseException | None],
    restarts: Sequence[Exception | None] = (),
    max_restarts: int = 3,
    change: Callable[[Recorded], None] = lambda trainer: None,
) -> tuple[list[str], BaseException | None]:
    """What happened, and the error that ended the run."""
    events: list[str] = []
    left = list(enumerate(ends))

    def make() -> Recorded:
        trainer = Recorded(events, *left.pop(0))
        change(trainer)
        return trainer

    try:
        asyncio.run(run_to_end(make, Restarted(events, *restarts), max_restarts))  # type: ignore[arg-type]
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
    assert "start again (1 of 3 within an hour): rank 1 is gone" in told.err
    assert "start again (2 of 3 within an hour): rank 2 is gone" in told.err
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


@pytest.mark.parametrize("apart", [3000.0, 3700.0])
def test_a_loss_counts_for_an_hour(monkeypatch, apart):
    now = [0.0]
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now[0])

    def later(trainer: Recorded) -> None:
        now[0] += apart

    events, error = played([lost()] * 5 + [None], max_restarts=1, change=later)
    if apart > restarts.HOUR_S:
        assert error is None and events.count("restart") == 5
    else:
        assert isinstance(error, ActorsLost) and events.count("restart") == 1


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


@pytest.mark.parametrize("second", [SaveFailed("the disk is full"), lost()])
def test_a_save_at_the_end_that_fails_hides_no_error(capsys, second):
    def full(trainer: Recorded) -> None:
        trainer.refuses_to_save = second

    events, raised = played([RuntimeError("an engine is gone")], change=full)
    assert str(raised) == "an engine is gone" and events == ["run 0", "save 0", "close 0"]
    assert f"step 1 could not be saved: {second}" in capsys.readouterr().err


def test_a_run_that_ends_is_not_saved_again():
    assert played([None]) == (["run 0", "close 0"], None)


class Failing(FakeActors):
    """Raises at update number k what `at` holds for it, once; an ActorsLost leaves nothing of the ranks."""

    def __init__(self, at: dict[int, Exception], *, after: bool = False) -> None:
        super().__init__()
        self.at, self.after, self.gone = dict(at), after, False

    async def update(self, batch) -> Updated:
        assert not self.gone, "lost actors are asked"
        error = self.at.pop(self.version + 1, None)
        if error is None:
            return await super().update(batch)
        if self.after:
            await super().update(batch)
        if isinstance(error, ActorsLost):
            self.gone = True
        raise error

    async def save(self, directory: str, version: int) -> None:
        assert not self.gone, "lost actors are asked"
        await super().save(directory, version)

    async def restart(self) -> None:
        await super().restart()
        self.gone = False


class Regenerating(FakeRollouts):
    """A group may come again under its name, as with the real engines, where an abort means the one that runs."""

    async def generate(self, key, prompt, sampling, seeds, **how):
        self._stop.discard(key)
        async for each in super().generate(key, prompt, sampling, seeds, **how):
            yield each


def trained(actors: FakeActors) -> dict[int, list]:
    """The last batch of each version: tokens and advantages."""
    return {
        batch.version: [(s.token_ids.tolist(), s.advantage) for minibatch in batch.minibatches for s in minibatch]
        for batch in actors.batches
    }


def run_with(path, actors: FakeActors, *, max_restarts: int = 3, **trainer) -> int:
    """Runs to the end; returns how many trainers it took."""
    cfg = tiny_config(total_steps=7, **trainer)
    made = []

    def make():
        one, _ = make_trainer(path, cfg, actors=actors, rollouts=Regenerating(seed=len(made), max_turns=9))
        made.append(one)
        return one

    asyncio.run(run_to_end(make, actors, max_restarts))
    assert made[-1].version == 7
    return len(made)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, list]:
    actors = Failing({})
    assert run_with(tmp_path_factory.mktemp("straight"), actors) == 1
    found = trained(actors)
    assert sorted(found) == list(range(7))
    return found


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [[1], [2], [3], [4], [7], [1, 2, 6], [3, 4, 5]])
def test_a_run_that_loses_its_actors_trains_on_what_it_would_have(tmp_path, undisturbed, at, after):
    actors = Failing({number: lost(number) for number in at}, after=after)
    assert run_with(tmp_path, actors) == 1 + len(at)
    assert trained(actors) == undisturbed and actors.restarted == len(at)


@pytest.mark.parametrize("at", [[1], [3], [7], [2, 3, 5]])
def test_a_run_of_which_batches_are_refused_trains_on_what_it_would_have(tmp_path, undisturbed, at):
    actors = Failing({number: BatchRefused("parity", "the engines compute something else") for number in at})
    assert run_with(tmp_path, actors) == 1
    assert trained(actors) == undisturbed
    entries = sorted((tmp_path / QUARANTINE).iterdir())
    assert [entry.name for entry in entries] == [f"step_{number - 1:06d}-parity" for number in at]
    for entry, number in zip(entries, at, strict=True):
        tokens = [r.token_ids.tolist() for group, _ in read_quarantined(entry).groups for r in group.responses]
        assert sorted(tokens) == sorted(ids[3:] for ids, _ in undisturbed[number - 1])


def test_a_signal_that_meets_the_loss_of_the_actors_ends_the_run(tmp_path):
    """A scheduler's signal reaches ranks too: that they die of it must not start them again."""
    moment = asyncio.Event()

    class Dying(Failing):
        async def update(self, batch) -> Updated:
            moment.set()
            await asyncio.sleep(0.01)
            return await super().update(batch)

    actors = Dying({1: lost()})
    trainer, _ = make_trainer(tmp_path, tiny_config(total_steps=3), actors=actors)

    async def signalled() -> None:
        running = asyncio.create_task(run_to_end(lambda: trainer, actors, 3))
        await moment.wait()
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(signalled())
    assert actors.restarted == 0


class LostWhileIdle(Failing):
    """Gives no sign of life any more while the batch of step k is collected, once for each k of `before`."""

    def __init__(self, before: list[int]) -> None:
        super().__init__({})
        self.before = list(before)

    async def until_lost(self) -> str:
        if self.version + 1 not in self.before:
            return await super().until_lost()
        await asyncio.sleep(0)
        self.before.remove(self.version + 1)
        self.gone = True
        return "rank 3 is gone"


@pytest.mark.parametrize("before", [[1], [3], [7], [2, 3, 5]])
def test_ranks_that_are_lost_while_engines_generate_start_again_at_once(tmp_path, undisturbed, capsys, before):
    actors = LostWhileIdle(before)
    assert run_with(tmp_path, actors) == 1 + len(before)
    assert trained(actors) == undisturbed and actors.restarted == len(before)
    assert capsys.readouterr().err.count("rank 3 is gone") == len(before)


def test_ranks_that_are_lost_in_an_evaluation_start_again_and_it_begins_anew(tmp_path):
    """An evaluation that nothing would end otherwise."""
    rollouts = StuckOnce()
    actors = LostWhileIdle([1])
    cfg = tiny_config(total_steps=2)
    cfg.eval.before_train = True

    def make():
        return make_trainer(tmp_path, cfg, actors=actors, rollouts=rollouts)[0]

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await run_to_end(make, actors, 3)

    asyncio.run(bounded())
    assert actors.restarted == 1 and actors.version == 2 and rollouts.stuck == 5
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "eval/accuracy" in line][0] == 0


class StuckOnce(Regenerating):
    """Answers nothing to the five prompts of the first evaluation."""

    stuck = 0

    async def generate(self, key, prompt, sampling, seeds, **how):
        if key.startswith("eval") and self.stuck < 5:
            self.stuck += 1
            await asyncio.Event().wait()
        async for each in super().generate(key, prompt, sampling, seeds, **how):
            yield each


def test_work_beside_idle_ranks_is_cut_short_by_their_loss_alone():
    async def body(lost_after: float | None, ends: Exception | None) -> tuple[str, list[str]]:
        actors, seen = FakeActors(), []

        async def lost_then() -> str:
            await asyncio.sleep(3600 if lost_after is None else lost_after)
            return "gone"

        async def work() -> str:
            try:
                await asyncio.sleep(0.01 if lost_after is None else 3600)
            finally:
                seen.append("ended")
            if ends is not None:
                raise ends
            return "done"

        actors.until_lost = lost_then
        try:
            found = await unless_lost(work(), actors)
        except (ActorsLost, ValueError) as error:
            found = f"{type(error).__name__} {error}"
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return found, seen

    assert asyncio.run(body(None, None)) == ("done", ["ended"])
    assert asyncio.run(body(None, ValueError("x"))) == ("ValueError x", ["ended"])
    assert asyncio.run(body(0.0, None)) == ("ActorsLost gone", ["ended"])
