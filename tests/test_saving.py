"""What a run saves, when it has to, and what it reads when it goes on."""

import asyncio

import pytest

from dapo.sampling.budget import BudgetExhausted
from dapo.state import manifest
from dapo.state.checkpoint import CheckpointStore
from tests.sampling.test_stream import make_trainer, tiny_config
from tests.support.faulty_pools import turns


def overlapping(total_steps: int):
    cfg = tiny_config(total_steps=total_steps)
    cfg.filter_groups.max_staleness = 1
    cfg.checkpoint.every = 0
    return cfg


def test_groups_that_the_last_checkpoint_holds_are_no_reason_to_write_it_again(tmp_path):
    """The buffer holds groups for the next update nearly always at staleness 1."""
    trainer, actors = make_trainer(tmp_path, overlapping(9))

    async def run() -> None:
        assert not trainer.unsaved
        while not trainer.stream.buffer.held():
            await trainer.step()
            await turns(40)
        assert trainer.unsaved
        held = len(trainer.stream.buffer.held())
        await trainer.save()
        assert len(trainer.stream.buffer.held()) == held, "nothing came meanwhile"
        assert not trainer.unsaved
        await trainer.step()
        assert trainer.unsaved, "a step was trained"
        await trainer.stream.close()

    asyncio.run(run())
    assert len(actors.saved) == 1


def test_groups_collected_since_the_last_checkpoint_are_saved(tmp_path):
    cfg = tiny_config(total_steps=9)
    cfg.filter_groups.max_num_gen_batches = 1
    trainer, _ = make_trainer(tmp_path, cfg, verdict=lambda prompt, sample, response: 1.0)

    async def run() -> None:
        await trainer.save()
        assert not trainer.unsaved
        with pytest.raises(BudgetExhausted):
            await trainer.step()
        assert trainer.unsaved and trainer.version == 0
        await trainer.save()
        assert not trainer.unsaved
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
    assert len(second.stream.buffer.held()) == 12 and not second.unsaved


def test_a_start_hashes_the_checkpoint_once(tmp_path, monkeypatch):
    """The entry point looks for a complete run, the trainer for where to go on; hundreds of gigabytes lie there."""
    first, _ = make_trainer(tmp_path, tiny_config(total_steps=2))
    asyncio.run(first.run())
    files = [path for path in (tmp_path / "checkpoints" / "step_000002").rglob("*") if path.is_file()]
    second, actors = make_trainer(tmp_path, tiny_config(total_steps=3))
    hashed: list[str] = []
    digest = manifest._digest
    monkeypatch.setattr(manifest, "_digest", lambda path, **how: hashed.append(path.name) or digest(path, **how))
    assert second._saver._store.latest() == tmp_path / "checkpoints" / "step_000002"
    asyncio.run(second._resume())
    assert actors.loaded and second.version == 2
    assert sorted(hashed) == sorted(path.name for path in files if path.name != "manifest.json")


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
