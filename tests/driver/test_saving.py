"""What a run saves, when it has to, and what it reads when it goes on."""

import asyncio
import threading

import pytest

from dapo.driver.saving import SaveFailed
from dapo.faults.recovery import run_to_end
from dapo.pools import ActorsLost
from dapo.sampling.budget import BudgetExhausted
from dapo.sampling.driver_state import DriverState, Due
from dapo.state import checkpoint, manifest
from dapo.state.checkpoint import CheckpointStore
from tests.support.driver.loops import make_trainer, tiny_config
from tests.support.driver.saved_runs import FULL
from tests.support.fakes import FakeActors
from tests.support.faulty_pools import lost, turns


def overlapping(total_steps: int):
    cfg = tiny_config(total_steps=total_steps)
    cfg.filter_groups.max_staleness = 1
    cfg.checkpoint.every = 0
    return cfg


def test_groups_that_the_last_checkpoint_holds_are_no_reason_to_write_it_again(tmp_path):
    """The buffer holds groups for the next update nearly always at staleness 1."""
    trainer, actors = make_trainer(tmp_path, overlapping(9))

    async def run() -> None:
        assert not trainer.saver.is_behind(trainer.version)
        while not trainer.stream.buffer.held():
            await trainer.step()
            await turns(40)
        assert trainer.saver.is_behind(trainer.version)
        held = len(trainer.stream.buffer.held())
        await trainer.save()
        assert len(trainer.stream.buffer.held()) == held, "nothing came meanwhile"
        assert not trainer.saver.is_behind(trainer.version)
        await trainer.step()
        assert trainer.saver.is_behind(trainer.version), "a step was trained"
        await trainer.stream.close()

    asyncio.run(run())
    assert len(actors.saved) == 1


def test_groups_collected_since_the_last_checkpoint_are_saved(tmp_path):
    cfg = tiny_config(total_steps=9)
    cfg.filter_groups.max_num_gen_batches = 1
    trainer, _ = make_trainer(tmp_path, cfg, verdict=lambda prompt, sample, response: 1.0)

    async def run() -> None:
        await trainer.save()
        assert not trainer.saver.is_behind(trainer.version)
        with pytest.raises(BudgetExhausted):
            await trainer.step()
        assert trainer.saver.is_behind(trainer.version) and trainer.version == 0
        await trainer.save()
        assert not trainer.saver.is_behind(trainer.version)
        await trainer.stream.close()

    asyncio.run(run())


def test_a_resumed_run_has_nothing_to_save_until_something_happens(tmp_path):
    cfg = tiny_config(total_steps=9)
    cfg.filter_groups.max_num_gen_batches = 1
    first, _ = make_trainer(tmp_path, cfg, verdict=lambda prompt, sample, response: 1.0)
    with pytest.raises(BudgetExhausted):
        asyncio.run(first.run())
    asyncio.run(first.save())
    second, _ = make_trainer(tmp_path, cfg, verdict=lambda prompt, sample, response: 1.0)
    asyncio.run(second._resume())
    assert len(second.stream.buffer.held()) == 12 and not second.saver.is_behind(second.version)


def test_a_start_hashes_the_checkpoint_once(tmp_path, monkeypatch):
    """The entry point looks for a complete run, the trainer for where to go on; hundreds of gigabytes lie there."""
    first, _ = make_trainer(tmp_path, tiny_config(total_steps=2))
    asyncio.run(first.run())
    files = [path for path in (tmp_path / "checkpoints" / "step_000002").rglob("*") if path.is_file()]
    second, actors = make_trainer(tmp_path, tiny_config(total_steps=3))
    hashed: list[str] = []
    digest = manifest._digest
    monkeypatch.setattr(manifest, "_digest", lambda path, **how: hashed.append(path.name) or digest(path, **how))
    assert second.saver._store.latest() == tmp_path / "checkpoints" / "step_000002"
    asyncio.run(second._resume())
    assert actors.loaded and second.version == 2
    assert sorted(hashed) == sorted(path.name for path in files if path.name != "manifest.json")


def test_engines_are_heard_while_the_checkpoint_is_hashed_after_a_loss_of_the_ranks(tmp_path, monkeypatch):
    """The event loop would stand still for minutes, in which nobody notices engines that die or hang."""

    class LostOnce(FakeActors):
        async def update(self, batch):
            if batch.version == 3 and not self.restarted:
                raise lost()
            return await super().update(batch)

    verify, threads = checkpoint.verify, []
    monkeypatch.setattr(checkpoint, "verify", lambda path: threads.append(threading.current_thread()) or verify(path))
    actors = LostOnce()
    asyncio.run(run_to_end(lambda: make_trainer(tmp_path, tiny_config(total_steps=4), actors=actors)[0], actors, 1))
    assert actors.restarted == 1 and actors.version == 4 and actors.loaded
    assert threads and threading.main_thread() not in threads


def test_a_checkpoint_that_was_replaced_is_looked_at_again(tmp_path):
    store = CheckpointStore(tmp_path, keep=0)

    async def write(text: str) -> None:
        async with store.writing(3) as directory:
            (directory / "weights").write_text(text)

    asyncio.run(write("old"))
    assert store.latest() == tmp_path / "step_000003"
    asyncio.run(write("new"))
    (tmp_path / "step_000003" / "weights").write_text("bad")
    with pytest.raises(ValueError, match="sha256 differs"):
        store.latest()


def failing(actors, error: Exception, times: int):
    """Lets so many saves fail after half of the work."""
    whole = actors.save

    async def save(directory: str, version: int) -> None:
        nonlocal times
        await whole(directory, version)
        times -= 1
        if times >= 0:
            raise error

    actors.save = save


@pytest.mark.parametrize("error", [FULL, RuntimeError("while waiting for actor rank 0: OSError: no space")])
def test_a_save_that_fails_leaves_the_checkpoint_before_it_and_the_run_goes_on(tmp_path, error, capsys):
    cfg = tiny_config(total_steps=9)
    cfg.checkpoint.every, cfg.checkpoint.max_failed_saves = 1, 3
    trainer, actors = make_trainer(tmp_path, cfg)
    events: list[tuple[str, str]] = []
    trainer._logger.event = lambda *event: events.append(event)

    async def steps() -> None:
        await trainer._resume()
        await trainer.step()
        failing(actors, error, 3)
        for _ in range(3):
            await trainer.step()
            assert [path.name for path in (tmp_path / "checkpoints").glob("step*")] == ["step_000001"]
            assert trainer.saver.is_behind(trainer.version)
        await trainer.step()
        await trainer.stream.close()

    asyncio.run(steps())
    trainer.saver.close()
    assert not trainer.saver.is_behind(trainer.version) and sorted(trainer.saver._store.steps()) == [1, 5]
    warnings = capsys.readouterr().err.strip().splitlines()
    assert len(warnings) == 3 and "step 2 could not be saved in `trainer.output_dir`" in warnings[0]
    assert "space" in warnings[0] and "failure 1 of 3" in warnings[0]
    assert events == [("save", "step 1"), *(("failed_save", f"step {step}") for step in (2, 3, 4)), ("save", "step 5")]


def test_too_many_saves_that_fail_in_a_row_end_the_run(tmp_path):
    cfg = tiny_config(total_steps=99)
    cfg.checkpoint.every, cfg.checkpoint.max_failed_saves = 1, 2
    trainer, actors = make_trainer(tmp_path, cfg)

    async def steps() -> None:
        await trainer._resume()
        failing(actors, FULL, 2)
        for _ in range(3):
            await trainer.step()
        failing(actors, FULL, 99)
        await trainer.step()
        await trainer.step()
        with pytest.raises(SaveFailed, match="step 6 .*No space left"):
            await trainer.step()
        await trainer.stream.close()

    asyncio.run(steps())
    trainer.saver.close()


def test_ranks_that_are_lost_in_a_save_are_no_failed_save(tmp_path):
    trainer, actors = make_trainer(tmp_path, tiny_config(total_steps=2))
    failing(actors, ActorsLost("rank 1 is gone"), 1)
    with pytest.raises(ActorsLost):
        asyncio.run(trainer.save())
    assert trainer.saver._failed == 0
    trainer.saver.close()


def test_a_save_is_due_by_step_and_by_time(tmp_path, monkeypatch):
    cfg = tiny_config(total_steps=99)
    cfg.checkpoint.every, cfg.checkpoint.every_s = 4, 60.0
    now = [1000.0]
    monkeypatch.setattr("dapo.driver.saving.time.monotonic", lambda: now[0])
    trainer, actors = make_trainer(tmp_path, cfg)
    saver = trainer.saver
    assert [version for version in range(10) if saver.is_due(version)] == [4, 8]
    now[0] += 60
    assert [version for version in range(4) if saver.is_due(version)] == [1, 2, 3], "version 0 is not trained"
    asyncio.run(trainer.save())
    assert not saver.is_due(1)
    now[0] += 60
    failing(actors, FULL, 1)
    asyncio.run(saver.save_or_go_on(1))
    assert saver.is_behind(1) and not saver.is_due(1), "not at once again"
    cfg.checkpoint.every_s = 0.0
    now[0] += 10**6
    assert [version for version in range(10) if saver.is_due(version)] == [4, 8]
    saver.close()


def test_what_is_due_is_part_of_the_state(tmp_path):
    trainer, _ = make_trainer(tmp_path, tiny_config(total_steps=9))
    trainer.saver.owes_evaluation = True
    trainer._logger._waiting.append('{"step": 0}')
    asyncio.run(trainer.save())
    trainer.saver.close()
    state = DriverState.read(tmp_path / "checkpoints" / "step_000000")
    assert state.due == Due(evaluate=True, lines=('{"step": 0}',))
