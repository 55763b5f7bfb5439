"""What a run saves, when it has to, and what it reads when it goes on."""

import asyncio

import pytest

from dapo.pools import ActorsLost
from dapo.sampling.budget import BudgetExhausted
from dapo.state import manifest
from dapo.state.driver_state import DriverState, Due
from dapo.state.saving import SaveFailed
from tests.support.driver.loops import FULL, killed, make_trainer, tiny_config


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
        assert len(trainer.stream.buffer.held()) == 12 and not trainer.saver.is_behind(trainer.version)
        await trainer.stream.close()

    asyncio.run(run())
    second, _ = make_trainer(tmp_path, cfg)
    asyncio.run(second.resume())
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
    asyncio.run(second.resume())
    assert actors.loaded and second.version == 2
    assert sorted(hashed) == sorted(path.name for path in files if path.name != "manifest.json")


def failing(actors, error: Exception, times: int):
    """Lets so many saves fail after half of the work."""
    save = actors.save

    async def fail(directory: str, version: int) -> None:
        nonlocal times
        await save(directory, version)
        times -= 1
        if times >= 0:
            raise error

    actors.save = fail


@pytest.mark.parametrize("error", [FULL, RuntimeError("while waiting for actor rank 0: OSError: no space")])
def test_a_save_that_fails_leaves_the_checkpoint_before_it_and_too_many_end_the_run(tmp_path, error, capsys):
    cfg = tiny_config(total_steps=99)
    cfg.checkpoint.every, cfg.checkpoint.max_failed_saves = 1, 3
    trainer, actors = make_trainer(tmp_path, cfg)
    events: list[tuple[str, str]] = []
    trainer._logger.event = lambda *event: events.append(event)

    async def steps() -> None:
        await trainer.resume()
        await trainer.step()
        failing(actors, error, 3)
        for _ in range(3):
            await trainer.step()
            assert [path.name for path in (tmp_path / "checkpoints").glob("step*")] == ["step_000001"]
            assert trainer.saver.is_behind(trainer.version)
        await trainer.step()
        assert not trainer.saver.is_behind(trainer.version) and sorted(trainer.saver._store.steps()) == [1, 5]
        failing(actors, error, 99)
        for _ in range(3):
            await trainer.step()
        with pytest.raises(SaveFailed, match="step 9 .*space"):
            await trainer.step()
        await trainer.stream.close()

    asyncio.run(steps())
    trainer.saver.close()
    warnings = capsys.readouterr().err.strip().splitlines()
    assert len(warnings) == 6 and "step 2 could not be saved in `trainer.output_dir`" in warnings[0]
    assert "space" in warnings[0] and "failure 1 of 3" in warnings[0]
    failed = [("failed_save", f"step {step}") for step in (2, 3, 4)]
    assert events[:5] == [("save", "step 1"), *failed, ("save", "step 5")]


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
    monkeypatch.setattr("dapo.state.saving.time.monotonic", lambda: now[0])
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


def test_a_model_that_was_moved_has_the_groups_of_its_journal(tmp_path):
    """Whether it is another one `config.yaml` tells, as for a checkpoint."""
    cfg = tiny_config(total_steps=9)
    cfg.model.path = "/mnt/one/model"
    asyncio.run(killed(make_trainer(tmp_path, cfg)[0], 0, 25))
    cfg.model.path = "/mnt/two/model"
    trainer, _ = make_trainer(tmp_path, cfg)
    assert asyncio.run(trainer.saver.resume(trainer._pools.rewards)).journaled > 0
    trainer.saver.close()


def test_what_is_due_is_part_of_the_state(tmp_path):
    trainer, _ = make_trainer(tmp_path, tiny_config(total_steps=9))
    trainer.evaluations.owe(0)
    trainer._logger._waiting.append('{"step": 0}')
    asyncio.run(trainer.save())
    trainer.saver.close()
    state = DriverState.read(tmp_path / "checkpoints" / "step_000000")
    assert state.due == Due(evaluate=True, lines=('{"step": 0}',))
