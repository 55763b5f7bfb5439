"""Saves that the run does not wait for: what they hold, and what waits for them."""

import asyncio
from pathlib import Path

import pytest

from dapo.sampling.driver_state import DRIVER_STATE, DriverState
from dapo.sampling.saved import FILE, write_groups
from tests.support.driver.loops import make_trainer
from tests.support.driver.saved_runs import seen, tokens
from tests.support.driver.slow_disk import SlowDisk, left, saving_config, taken
from tests.support.faulty_pools import turns


def files(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in ("LATEST", "manifest.json")
    }


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_files_are_those_of_a_save_that_is_waited_for(tmp_path, staleness):
    """What the buffer holds at the moment of a save depends on timing at staleness 1, and is what is saved."""
    cfg = saving_config(total_steps=5)
    cfg.filter_groups.max_staleness = staleness
    trainer, actors = make_trainer(tmp_path / "async", cfg, actors=SlowDisk(opened=True))
    capture = trainer.saver._capture

    def noted(version):
        (there := tmp_path / str(version)).mkdir()
        write_groups(there, trainer._buffer.held())
        DriverState(version=version, buffer=trainer._buffer.state()).write(there)
        return capture(version)

    trainer.saver._capture = noted
    asyncio.run(trainer.run())
    trainer.saver.close()
    assert left(tmp_path / "async") == [f"step_{version:06d}" for version in range(1, 6)]
    for version in range(1, 6):
        directory = tmp_path / "async" / "checkpoints" / f"step_{version:06d}"
        assert (directory / "actor" / "weights").read_text() == str(version)
        for name in (DRIVER_STATE, FILE):
            assert (directory / name).read_bytes() == (tmp_path / str(version) / name).read_bytes()
    if staleness == 0:
        cfg.checkpoint.async_save = False
        waited, wanted = make_trainer(tmp_path / "waited", cfg)
        asyncio.run(waited.run())
        waited.saver.close()
        assert tokens(actors) == tokens(wanted)
        assert files(tmp_path / "async" / "checkpoints") == files(tmp_path / "waited" / "checkpoints")


def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_what_was_when_it_was_due(tmp_path):
    cfg = saving_config(every=2)
    cfg.filter_groups.max_staleness = 1
    trainer, actors = make_trainer(tmp_path, cfg, actors=SlowDisk())
    saver = trainer.saver

    async def run() -> None:
        await taken(trainer, 2)
        state, held = trainer._buffer.state(), trainer._buffer.held()
        await taken(trainer, 1)
        assert actors.log[-3:] == ["staged 2", "writes", "update 2"], "copied before it changes"
        assert state != trainer._buffer.state() and left(tmp_path)[0].endswith(".tmp")
        assert not (tmp_path / "checkpoints" / "LATEST").exists() and saver.is_behind(2)
        actors.gate.set()
        await saver._ended()
        assert (tmp_path / "checkpoints" / "LATEST").read_text() == "step_000002\n" and not saver.is_due(2)
        assert (tmp_path / "checkpoints" / "step_000002" / "actor" / "weights").read_text() == "2"
        assert saver._groups == {(group.draw.index, started) for group, started in held}
        await trainer.stream.close()

    asyncio.run(run())
    saver.close()
    again, loaded = make_trainer(tmp_path, cfg)
    asyncio.run(again._resume())
    assert again.version == 2 and loaded.version == 2
    again.saver.close()


@pytest.mark.parametrize("refused", [False, True])
def test_an_update_waits_for_the_copy_and_generation_does_not(tmp_path, refused):
    """Where the copy fails, the update goes on."""
    cfg = saving_config(every=2)
    trainer, actors = make_trainer(tmp_path, cfg, actors=SlowDisk(opened=True))

    async def run() -> None:
        await taken(trainer, 2)
        actors.copying.clear()
        third = asyncio.create_task(trainer.step())
        await turns(300)
        assert "staged 2" not in actors.log and "update 2" not in actors.log and not third.done()
        assert any(name.startswith("v2-") for name in seen(trainer)), "the engines work"
        if refused:
            actors.version = -1
        actors.copying.set()
        while trainer.saver._copied.is_set() is False:
            await asyncio.sleep(0)
        actors.version = 2
        await third
        assert ("staged 2" in actors.log) != refused and trainer.version == 3
        await trainer.saver._ended()
        await trainer.stream.close()

    asyncio.run(run())
    trainer.saver.close()
    assert left(tmp_path) == ([] if refused else ["step_000002"])


def test_a_save_that_is_due_waits_for_the_one_before(tmp_path):
    trainer, actors = make_trainer(tmp_path, saving_config(), actors=SlowDisk())

    async def run() -> None:
        await taken(trainer, 1)
        second = asyncio.create_task(trainer.step())
        async with asyncio.timeout(60):
            while actors.log[-1] != "update 1":  # a thread that writes the batch of the first step comes before it
                await asyncio.sleep(0.001)
        await turns(200)
        assert actors.log == ["update 0", "staged 1", "writes", "update 1"] and not second.done()
        assert trainer.saver.acts == ("save", "save")
        actors.gate.set()
        await second
        assert actors.log[4:] == ["written"] and not trainer.saver._copied.is_set(), "begun, not waited for"
        await trainer.saver._ended()
        assert trainer.saver.acts == ("save",)
        await trainer.stream.close()

    asyncio.run(run())
    trainer.saver.close()
    assert actors.log.count("writes") == actors.log.count("written") == 2


def test_the_time_since_the_last_save_begins_at_its_end(tmp_path):
    """Else a save that takes longer than `checkpoint.every_s` would hold up every step."""
    cfg = saving_config(every=0)
    cfg.checkpoint.every_s = 1e-6
    trainer, actors = make_trainer(tmp_path, cfg, actors=SlowDisk())

    async def run() -> None:
        await taken(trainer, 4)
        assert actors.log.count("writes") == 1
        actors.gate.set()
        await trainer.saver._running
        await taken(trainer, 1)
        assert actors.log.count("staged 5") == 0
        await trainer.saver._ended()
        await trainer.stream.close()

    asyncio.run(run())
    trainer.saver.close()
    assert left(tmp_path) == ["step_000001", "step_000005"]
