"""Evaluations at the side of a run that are dropped, fail or begin anew."""

import asyncio
import time

import pytest

from dapo.faults.limit import TimeLimit, TimeLimitReached
from dapo.faults.recovery import run_to_end
from dapo.pools import BatchRefused
from dapo.sampling.driver_state import owes_evaluation
from dapo.trainer import Trainer
from tests.support.driver.asides import EVALUATED, Slots, evaluations, made, steps_of
from tests.support.driver.loops import some_mixed
from tests.support.fakes import FakeRewards
from tests.support.faulty_pools import run


class Stuck(Slots):
    """Never ends an answer to the evaluation of `version`."""

    version_stuck = 2
    reached: asyncio.Event

    async def generate(self, key, prompt, sampling, seeds, *, background=False, problem=None):
        if key.startswith(f"eval-v{self.version_stuck}-"):
            self.reached.set()
            while key not in self._stop:
                await asyncio.sleep(0.001)
        async for each in super().generate(key, prompt, sampling, seeds, background=background, problem=problem):
            yield each


async def to_its_end(trainer: Trainer) -> None:
    await run_to_end(lambda: trainer, trainer._pools.actors, 0)


def test_a_signal_in_an_update_does_not_wait_for_the_evaluation(tmp_path, capsys):
    trainer, rollouts, actors = made(tmp_path, rollouts=(rollouts := Stuck()))

    async def body():
        rollouts.reached = asyncio.Event()
        running = asyncio.create_task(to_its_end(trainer))
        await rollouts.reached.wait()
        while len(actors.batches) < 3:  # the update after the evaluation began
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(body())
    assert trainer.version == 3 and not trainer.saver.is_behind(3)
    assert "the evaluation of step 2 was cut short and has no result" in capsys.readouterr().err
    assert list(evaluations(tmp_path)) == [0] and [line["step"] for line in steps_of(tmp_path)] == [1, 2, 3]
    again, _, _ = made(tmp_path)
    run(again.run())
    assert list(evaluations(tmp_path)) == [0, 4, 5], "its policy is gone"


@pytest.mark.parametrize("left_s", [-1.0, 0.3])
def test_the_last_evaluation_is_left_by_the_time_limit_and_made_up_for(tmp_path, left_s):
    """It would go on until the scheduler ends the process. left_s: of the limit when the last step is saved."""
    limit = TimeLimit(1.0, time.monotonic())
    rollouts = Stuck()
    trainer, _, actors = made(tmp_path, rollouts=rollouts, limit=limit)
    rollouts.version_stuck, rollouts.reached = 5, asyncio.Event()
    save = actors.save

    async def late(directory, version):
        limit._began = time.monotonic() - 3600 + left_s
        await save(directory, version)

    actors.save = late
    with pytest.raises(TimeLimitReached, match=r"`trainer.max_hours` \(1\)"):
        run(to_its_end(trainer))
    assert rollouts.reached.is_set() and time.monotonic() - limit._began < 3600 + 5
    assert list(evaluations(tmp_path)) == [0, 2, 4] and trainer.saver._store.steps() == [5]
    assert owes_evaluation(trainer.saver._store.latest(), tmp_path)
    again, _, resting = made(tmp_path)
    run(again.run())
    assert list(evaluations(tmp_path)) == EVALUATED and not resting.batches


def test_engines_that_are_lost_in_an_update_end_the_evaluation_and_not_the_run(tmp_path, capsys):
    """One that starts again has to wait for the weights of the update, and cannot answer with those before."""
    trainer, rollouts, actors = made(tmp_path, rollouts=(rollouts := Stuck()))
    rollouts.reached = asyncio.Event()
    update, sync = actors.update, trainer._pools.sync_weights

    async def losing(batch):
        rollouts.serving = batch.version != 2
        return await update(batch)

    async def syncing(version):
        rollouts.serving = True
        await sync(version)

    actors.update = losing
    object.__setattr__(trainer._pools, "sync_weights", syncing)
    run(trainer.run())
    assert trainer.version == 5 and list(evaluations(tmp_path)) == [0, 4, 5]
    assert "the evaluation of step 2 was cut short" in capsys.readouterr().err


def test_a_failed_evaluation_ends_the_run_and_saves_what_was_trained(tmp_path):
    class Failing(FakeRewards):
        async def score(self, prompt, sample, response):
            if response.policy_versions[0].version == 2 and prompt.id < 5 and trainer.version == 3:
                raise RuntimeError("the verifier broke")
            return await super().score(prompt, sample, response)

    trainer, _, _ = made(tmp_path, rollouts=Late())
    object.__setattr__(trainer._pools, "rewards", Failing(some_mixed))
    with pytest.raises(RuntimeError, match="the verifier broke"):
        run(to_its_end(trainer))
    assert trainer.version == 3 and not trainer.saver.is_behind(3)


class Late(Slots):
    """Answers to evaluations take long."""

    async def generate(self, key, prompt, sampling, seeds, *, background=False, problem=None):
        if key.startswith("eval-"):
            await asyncio.sleep(0.05)
        async for each in super().generate(key, prompt, sampling, seeds, background=background, problem=problem):
            yield each


def test_answers_of_another_version_are_an_error(tmp_path):
    rollouts = Late()
    trainer, _, _ = made(tmp_path, rollouts=rollouts)

    async def body():
        running = asyncio.create_task(trainer.run())
        while not any(event.startswith("v2-d") for event in rollouts.events):
            await asyncio.sleep(0)
        rollouts.version = 7
        await running

    with pytest.raises(RuntimeError, match="evaluation of policy version 2 were sampled by versions .*7"):
        run(body())


def test_an_evaluation_begins_anew_when_its_weights_may_have_been_wrong(tmp_path):
    """A batch that the actors refuse is a sign of that."""
    rollouts = Stuck()
    trainer, _, actors = made(tmp_path, rollouts=rollouts)
    rollouts.reached = asyncio.Event()
    update, begun = actors.update, []

    async def refusing(batch):
        if batch.version == 2 and not begun:
            await rollouts.reached.wait()
            begun.append(trainer.evaluations._evaluation)
            rollouts.version_stuck = -1
            raise BatchRefused("parity", "the engines sample from other probabilities")
        if batch.version == 2:
            begun.append(trainer.evaluations._evaluation)
        return await update(batch)

    actors.update = refusing
    run(trainer.run())
    assert list(evaluations(tmp_path)) == EVALUATED and evaluations(tmp_path)[2]["eval/samples"] == 10
    assert len(begun) == 2 and begun[0] is not begun[1], "what was stuck has not ended by itself"
