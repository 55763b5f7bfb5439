"""Saves that the run does not wait for, and that fail or are met by its end, a loss or a crash."""

import asyncio
import threading

import pytest

from dapo.batch import build_batch
from dapo.driver.saving import SaveFailed
from dapo.faults.recovery import run_to_end
from dapo.pools import ActorsLost
from dapo.state.checkpoint import CheckpointStore
from tests.support.driver.loops import make_trainer
from tests.support.driver.saved_runs import FULL, seen, tokens
from tests.support.driver.slow_disk import SlowDisk, left, saving_config, taken
from tests.support.faulty_pools import turns


@pytest.mark.parametrize("error", [FULL, RuntimeError("while waiting for actor rank 0: OSError: no space")])
def test_a_save_that_fails_beside_the_run_is_told_and_counts(tmp_path, error, capsys):
    cfg = saving_config()
    cfg.checkpoint.max_failed_saves = 2
    trainer, actors = make_trainer(
        tmp_path, cfg, actors=SlowDisk(None, error, error, None, error, error, error, opened=True)
    )

    async def run() -> None:
        await taken(trainer, 5)
        assert left(tmp_path)[:1] == ["step_000001"] and trainer.saver._failed == 0
        await taken(trainer, 2)
        with pytest.raises(SaveFailed, match=r"step 7 could not be saved in `trainer.output_dir`.*space"):
            await taken(trainer, 1)
        await trainer.saver.abandon()
        await trainer.stream.close()

    asyncio.run(run())
    trainer.saver.close()
    told = capsys.readouterr().err
    assert told.count("failure 1 of 2") == 2 and told.count("failure 2 of 2") == 2
    assert left(tmp_path) == ["step_000001", "step_000004"], "no directory of a failed save is left"
    assert sorted(path.name for path in (tmp_path / "journal").iterdir())[0] == "after_000001.log"


def test_a_run_whose_last_save_but_one_failed_tries_once_more(tmp_path, capsys):
    cfg = saving_config(total_steps=3)
    cfg.checkpoint.max_failed_saves = 0
    trainer, actors = make_trainer(tmp_path, cfg, actors=SlowDisk(None, FULL, opened=True))
    asyncio.run(run_to_end(lambda: trainer, actors, 0))
    assert left(tmp_path) == ["step_000001", "step_000003"]
    assert "step 2 could not be saved" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "saved"), [(1, ["written"]), (2, ["written"])])
def test_a_signal_waits_for_the_save_that_runs(tmp_path, steps, saved):
    """And saves again where a step was trained meanwhile."""
    cfg = saving_config(every=1 if steps == 1 else 9)
    cfg.checkpoint.every_s = 0.0 if steps == 1 else 1e-6
    trainer, actors = make_trainer(tmp_path, cfg, actors=SlowDisk())

    async def run() -> None:
        running = asyncio.create_task(run_to_end(lambda: trainer, actors, 0))
        while f"update {steps - 1}" not in actors.log or "writes" not in actors.log:
            await asyncio.sleep(0)
        running.cancel()
        await turns(50)
        assert not running.done() and "written" not in actors.log
        actors.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert left(tmp_path)[0] == "step_000001" and [each for each in actors.log if each == "written"] == saved
    assert left(tmp_path)[-1] == f"step_{trainer.version:06d}"
    assert (tmp_path / "checkpoints" / "LATEST").read_text().strip() == left(tmp_path)[-1]


def test_a_save_that_ran_and_holds_all_is_not_made_again(tmp_path):
    trainer, actors = make_trainer(tmp_path, saving_config(), actors=SlowDisk(opened=True))

    async def run() -> None:
        await trainer.saver.save_or_go_on(0)
        await trainer.save()
        assert len(actors.saved) == 1
        await trainer.save()
        assert len(actors.saved) == 2, "none ran"

    asyncio.run(run())
    trainer.saver.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_ranks_that_are_lost_beside_a_save_end_it(tmp_path, sealed, monkeypatch):
    """Where all files are written the checkpoint is kept, and the run goes on from it."""
    cfg = saving_config(total_steps=4, every=2)
    sealing, may_seal = threading.Event(), threading.Event()
    seal = CheckpointStore._seal_and_commit

    def slowly(store, step, temporary):
        if step == 2 and not sealing.is_set():
            sealing.set()
            assert may_seal.wait(30)
        seal(store, step, temporary)

    monkeypatch.setattr(CheckpointStore, "_seal_and_commit", slowly)

    class Lost(SlowDisk):
        async def update(self, batch):
            if batch.version == 2 and not self.restarted:
                while sealed and not sealing.is_set():
                    await asyncio.sleep(0.001)
                asyncio.get_running_loop().call_later(0.05, may_seal.set)
                raise ActorsLost("rank 1 is gone")
            return await super().update(batch)

        async def restart(self) -> None:
            await super().restart()
            self.gate.set()

    actors = Lost(opened=sealed)
    made = []

    def make():
        made.append(make_trainer(tmp_path, cfg, actors=actors)[0])
        return made[-1]

    may_seal.set() if not sealed else None
    asyncio.run(run_to_end(make, actors, 1))
    assert [len(made), actors.restarted] == [2, 1] and made[-1].version == 4
    assert bool(actors.loaded) == sealed and left(tmp_path) == ["step_000002", "step_000004"]
    straight, wanted = make_trainer(tmp_path / "straight", cfg)
    asyncio.run(straight.run())
    straight.saver.close()
    assert tokens(actors)[-len(tokens(wanted)) + 2 * sealed :] == tokens(wanted)[2 * sealed :]


def test_ranks_that_are_lost_in_a_save_are_found_at_the_next_one(tmp_path):
    trainer, actors = make_trainer(
        tmp_path, saving_config(), actors=SlowDisk(ActorsLost("rank 1 is gone"), opened=True)
    )

    async def run() -> None:
        await taken(trainer, 1)
        with pytest.raises(ActorsLost, match="rank 1"):
            await trainer.step()
        await trainer.stream.close()

    asyncio.run(run())
    trainer.saver.close()
    assert trainer.saver._failed == 0 and left(tmp_path) == []


@pytest.mark.parametrize("crash", [0, 12, 40])
def test_after_a_crash_beside_a_save_the_run_is_the_same_and_generates_less(tmp_path, crash):
    """The process dies while checkpoint 4 is written: it goes on from 2, with the journal's groups of policy 2."""
    cfg = saving_config(total_steps=7, every=2)
    straight, wanted = make_trainer(tmp_path / "straight", cfg)
    asyncio.run(straight.run())
    straight.saver.close()
    first, actors = make_trainer(tmp_path / "crashed", cfg, actors=SlowDisk(opened=True))
    third: set[str] = set()

    async def until_it_dies() -> None:
        await first._resume()
        await taken(first, 2)
        await first.saver._running
        actors.gate.clear()
        collected = await first.stream.collect()
        third.update(f"v2-d{group.draw.index}" for group in collected.drawn)
        await first._update(collected, build_batch(collected.groups, cfg, version=2))
        await taken(first, 1)
        running = asyncio.create_task(first.step())
        await turns(crash)
        first.saver.journal.close()
        running.cancel()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(until_it_dies())
    assert actors.log.count("written") == 1
    assert left(tmp_path / "crashed")[0] == "step_000002"
    second, found = make_trainer(tmp_path / "crashed", cfg)
    asyncio.run(second.run())
    second.saver.close()
    assert tokens(found) == tokens(wanted)[2:], "it goes on from checkpoint 2"
    assert found.loaded and third and not third & set(seen(second)), "the journal outlives the save of step 4"
