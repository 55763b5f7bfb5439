"""Runs that a signal or an error cuts short: what is written to its end, evaluations that are owed, the line of the
step."""

import asyncio
from dataclasses import replace

import pytest

from dapo.driver.recovery import run_to_end
from dapo.evaluation.held_out import Evaluation
from dapo.ground.time_limit import TimeLimitReached
from dapo.report.log import read_metrics
from dapo.state.driver_state import DriverState, owes_evaluation
from tests.support.driver.loops import make_trainer, tiny_config, whole
from tests.support.fakes import FakeActors
from tests.support.faulty_pools import turns


async def cancel_in(trainer, moment: asyncio.Event) -> None:
    running = asyncio.create_task(run_to_end(lambda: trainer, trainer._pools.actors, 0))
    await asyncio.wait_for(moment.wait(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def steps_with(path, name: str) -> list[int]:
    return [line["step"] for line in read_metrics(path / "metrics.jsonl") if name in line]


def evaluations(path) -> list[int]:
    return steps_with(path, "eval/accuracy")


@pytest.mark.parametrize("version", [2, 4, 5])
def test_an_evaluation_that_a_signal_cut_short_comes_after_the_restart(tmp_path, monkeypatch, version):
    cfg = tiny_config(total_steps=5)
    cfg.checkpoint.every = 0
    first, _ = make_trainer(tmp_path, cfg)
    moment, answers = asyncio.Event(), Evaluation.answers

    async def hang(evaluation):
        if evaluation.version == version:
            moment.set()
            await asyncio.Event().wait()
        return await answers(evaluation)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "answers", hang)
        asyncio.run(cancel_in(first, moment))
    assert version not in evaluations(tmp_path) and version in steps_with(tmp_path, "actor/loss")
    directory = tmp_path / "checkpoints" / f"step_{version:06d}"
    assert DriverState.read(directory).due.evaluate and owes_evaluation(directory, tmp_path)
    for _ in range(2):  # done once
        whole(make_trainer(tmp_path, cfg)[0])
        assert evaluations(tmp_path) == [0, 2, 4, 5]
    assert not owes_evaluation(directory, tmp_path)


def test_a_step_that_a_signal_meets_in_its_update_has_its_line(tmp_path):
    first, actors = make_trainer(tmp_path, tiny_config(total_steps=5))
    moment = asyncio.Event()
    update = actors.update

    async def slow(batch):
        if batch.version == 2:
            moment.set()
            await turns(20)
        return await update(batch)

    actors.update = slow
    asyncio.run(cancel_in(first, moment))
    assert first.version == 3 and steps_with(tmp_path, "actor/loss") == [1, 2, 3]
    whole(make_trainer(tmp_path, tiny_config(total_steps=5))[0])
    assert steps_with(tmp_path, "actor/loss") == [1, 2, 3, 4, 5]


def test_a_step_whose_weight_sync_fails_has_its_line(tmp_path):
    trainer, _ = make_trainer(tmp_path, tiny_config(total_steps=5))
    sync = trainer._pools.sync_weights

    async def broken(version: int) -> None:
        await sync(version)
        if version == 3:
            raise RuntimeError("engine 0 is gone")

    trainer._trainer._pools = replace(trainer._pools, sync_weights=broken)
    with pytest.raises(RuntimeError, match="engine 0 is gone"):
        asyncio.run(run_to_end(lambda: trainer, trainer._pools.actors, 0))
    assert steps_with(tmp_path, "actor/loss") == [1, 2, 3] and 3 in trainer.saver._store.steps()


class SlowToSave(FakeActors):
    """Actors that write when they are let, and end `update` number 4 with `error`, if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.begun, self.free = error, asyncio.Event(), asyncio.Event()

    async def update(self, batch):
        if self.version == 3 and self.error is not None:
            raise self.error
        return await super().update(batch)

    async def save(self, directory: str, version: int) -> None:
        self.begun.set()
        await self.free.wait()
        await super().save(directory, version)


@pytest.mark.parametrize(
    ("error", "cancelled"),
    [
        pytest.param(RuntimeError("an engine is gone"), 1, id="a signal after an error"),
        pytest.param(TimeLimitReached("nearly over"), 1, id="a signal after the limit"),
        pytest.param(RuntimeError("an engine is gone"), 2, id="a signal and the loss of the head"),
        pytest.param(None, 2, id="twice after a signal"),
    ],
)
def test_what_comes_while_the_last_save_is_written_leaves_it_and_the_first_error(tmp_path, error, cancelled):
    cfg = tiny_config(total_steps=100)
    cfg.checkpoint.every = 0
    actors = SlowToSave(error)
    trainer, _ = make_trainer(tmp_path, cfg, actors=actors)

    async def body() -> None:
        running = asyncio.create_task(run_to_end(lambda: trainer, actors, 0))
        while error is None and trainer.version < 3:
            await asyncio.sleep(0)
        if error is None:
            running.cancel()
        await asyncio.wait_for(actors.begun.wait(), 30)
        for _ in range(cancelled):
            running.cancel()
            await turns(20)
            assert not running.done(), "it waits for the save"
        actors.free.set()
        await running

    with pytest.raises(asyncio.CancelledError if error is None else type(error)) as raised:
        asyncio.run(body())
    assert error is None or raised.value is error
    assert trainer.version >= 3 and trainer.saver._store.steps() == [trainer.version]
    assert not trainer.saver.is_behind(trainer.version)
