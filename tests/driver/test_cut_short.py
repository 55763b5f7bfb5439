"""Runs that a signal or an error cuts short: evaluations that are owed, and the line of the step."""

import asyncio
from dataclasses import replace

import pytest

from dapo.evaluate.evaluation import Evaluation
from dapo.faults.recovery import run_to_end
from dapo.report.log import read_metrics
from dapo.sampling.driver_state import DriverState, owes_evaluation
from tests.support.driver.loops import make_trainer, tiny_config
from tests.support.faulty_pools import turns


async def cancel_in(trainer, moment: asyncio.Event) -> None:
    """A signal, and what the program does about it."""
    running = asyncio.create_task(run_to_end(lambda: trainer, trainer._pools.actors, 0))
    await asyncio.wait_for(moment.wait(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def evaluations(path) -> list[int]:
    return [line["step"] for line in read_metrics(path / "metrics.jsonl") if "eval/accuracy" in line]


def step_lines(path) -> list[int]:
    return [line["step"] for line in read_metrics(path / "metrics.jsonl") if "actor/loss" in line]


@pytest.mark.parametrize("version", [2, 4, 5])
def test_an_evaluation_that_a_signal_cut_short_comes_after_the_restart(tmp_path, monkeypatch, version):
    """The one of step 5 is the last act of the run."""
    cfg = tiny_config(total_steps=5)
    cfg.checkpoint.every = 0
    straight, _ = make_trainer(tmp_path / "straight", cfg)
    asyncio.run(straight.run())
    first, _ = make_trainer(tmp_path, cfg)
    moment = asyncio.Event()

    answers = Evaluation.answers

    async def hang(evaluation):
        if evaluation.version == version:
            moment.set()
            await asyncio.Event().wait()
        return await answers(evaluation)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "answers", hang)
        asyncio.run(cancel_in(first, moment))
    assert version not in evaluations(tmp_path) and version in step_lines(tmp_path)
    directory = tmp_path / "checkpoints" / f"step_{version:06d}"
    assert DriverState.read(directory).due.evaluate and owes_evaluation(directory, tmp_path)
    second, _ = make_trainer(tmp_path, cfg)
    asyncio.run(second.run())
    second.saver.close()
    assert evaluations(tmp_path) == evaluations(tmp_path / "straight") == [0, 2, 4, 5]
    assert not owes_evaluation(directory, tmp_path)
    third, _ = make_trainer(tmp_path, cfg)
    asyncio.run(third.run())
    third.saver.close()
    assert evaluations(tmp_path) == [0, 2, 4, 5], "done once"


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
    assert first.version == 3 and step_lines(tmp_path) == [1, 2, 3]
    second, _ = make_trainer(tmp_path, tiny_config(total_steps=5))
    asyncio.run(second.run())
    second.saver.close()
    assert step_lines(tmp_path) == [1, 2, 3, 4, 5]


def test_a_step_whose_weight_sync_fails_has_its_line(tmp_path):
    trainer, _ = make_trainer(tmp_path, tiny_config(total_steps=5))
    sync = trainer._pools.sync_weights

    async def broken(version: int) -> None:
        await sync(version)
        if version == 3:
            raise RuntimeError("engine 0 is gone")

    trainer._pools = replace(trainer._pools, sync_weights=broken)
    with pytest.raises(RuntimeError, match="engine 0 is gone"):
        asyncio.run(run_to_end(lambda: trainer, trainer._pools.actors, 0))
    trainer.saver.close()
    assert step_lines(tmp_path) == [1, 2, 3] and 3 in trainer.saver._store.steps()
