"""Saves that the run does not wait for: what they hold, what waits for them, and how they end."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dapo.driver.recovery import run_to_end
from dapo.pools import ActorsLost
from dapo.state.checkpoint import CheckpointStore
from dapo.state.driver_state import DRIVER_STATE, DriverState
from dapo.state.groups import FILE, write_groups
from dapo.state.saving import SaveFailed
from tests.support.driver.loops import FULL, make_trainer, seen, tiny_config, tokens, whole
from tests.support.fakes import FakeActors
from tests.support.faulty_pools import turns


class SlowDisk(FakeActors):
    """Makes a copy when `copying` is set, writes it when `gate` is, and then raises the next one of `errors`. log: what
    it does, in order."""

    def __init__(self, *errors: Exception | None, opened: bool = False) -> None:
        super().__init__()
        self.errors, self.gate, self.log = list(errors), asyncio.Event(), []
        self.copying = asyncio.Event()
        self.copying.set()
        if opened:
            self.gate.set()

    async def update(self, batch):
        self.log.append(f"update {batch.version}")
        return await super().update(batch)

    async def stage(self, version: int, *, export: bool) -> None:
        await turns(3)
        await self.copying.wait()
        await super().stage(version, export=export)
        self.log.append(f"staged {version}")

    async def write_staged(self, directory: str, export: str) -> None:
        self.log.append("writes")
        await self.gate.wait()
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            Path(directory).mkdir()
            raise error
        await super().write_staged(directory, export)
        self.log.append("written")


def saving_config(total_steps: int = 9, every: int = 1, staleness: int = 0):
    cfg = tiny_config(total_steps=total_steps)
    cfg.checkpoint.async_save, cfg.checkpoint.every = True, every
    cfg.filter_groups.max_staleness = staleness
    cfg.eval.every, cfg.eval.after_train = 0, False  # whether one is still owed depends on timing
    return cfg


def played(trainer, body: Callable[[], Awaitable[None]]) -> None:

    async def ended() -> None:
        await body()
        await trainer.saver.abandon()
        await trainer.stream.close()

    asyncio.run(ended())
    trainer.saver.close()


async def taken(trainer, count: int) -> None:
    for _ in range(count):
        await trainer.step()


def left(path) -> list[str]:
    return sorted(each.name for each in (path / "checkpoints").glob("step_*"))


def files(path: Path) -> dict[str, bytes]:
    found = sorted(each for each in path.rglob("*") if each.is_file() and each.name not in ("LATEST", "manifest.json"))
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_files_are_those_of_a_save_that_is_waited_for(tmp_path, staleness):
    cfg = saving_config(total_steps=5, staleness=staleness)
    trainer, actors = make_trainer(tmp_path / "async", cfg, actors=SlowDisk(opened=True))
    capture = trainer.saver._capture

    def noted(version):
        (there := tmp_path / str(version)).mkdir()
        write_groups(there / FILE, trainer.buffer.held())
        DriverState(version=version, buffer=trainer.buffer.state()).write(there)
        return capture(version)

    trainer.saver._capture = noted
    whole(trainer)
    assert left(tmp_path / "async") == [f"step_{version:06d}" for version in range(1, 6)]
    for version in range(1, 6):
        directory = tmp_path / "async" / "checkpoints" / f"step_{version:06d}"
        assert (directory / "actor" / "weights").read_text() == str(version)
        for name in (DRIVER_STATE, FILE):
            assert (directory / name).read_bytes() == (tmp_path / str(version) / name).read_bytes()
    if staleness == 0:
        cfg.checkpoint.async_save = False
        waited, wanted = make_trainer(tmp_path / "waited", cfg)
        whole(waited)
        assert tokens(actors) == tokens(wanted)
        assert files(tmp_path / "async" / "checkpoints") == files(tmp_path / "waited" / "checkpoints")


def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_what_was_when_it_was_due(tmp_path):
    cfg = saving_config(every=2, staleness=1)
    trainer, actors = make_trainer(tmp_path, cfg, actors=SlowDisk())
    saver = trainer.saver

    async def run() -> None:
        await taken(trainer, 2)
        state, held = trainer.buffer.state(), trainer.buffer.held()
        await taken(trainer, 1)
        assert actors.log[-3:] == ["staged 2", "writes", "update 2"], "copied before it changes"
        assert state != trainer.buffer.state() and left(tmp_path)[0].endswith(".tmp")
        assert not (tmp_path / "checkpoints" / "LATEST").exists() and saver.is_behind(2)
        actors.gate.set()
        await saver._ended()
        assert (tmp_path / "checkpoints" / "LATEST").read_text() == "step_000002\n" and not saver.is_due(2)
        assert (tmp_path / "checkpoints" / "step_000002" / "actor" / "weights").read_text() == "2"
        assert saver._groups == {(group.draw.index, started) for group, started in held}

    played(trainer, run)
    again, loaded = make_trainer(tmp_path, cfg)
    asyncio.run(again.resume())
    assert again.version == 2 and loaded.version == 2
    again.saver.close()


@pytest.mark.parametrize("refused", [False, True])
def test_an_update_waits_for_the_copy_and_generation_does_not(tmp_path, refused):
    trainer, actors = make_trainer(tmp_path, saving_config(every=2), actors=SlowDisk(opened=True))

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

    played(trainer, run)
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

    played(trainer, run)
    assert actors.log.count("writes") == actors.log.count("written") == 2


def test_a_save_that_fails_beside_the_run_is_told_and_counts(tmp_path, capsys):
    cfg = saving_config()
    cfg.checkpoint.max_failed_saves = 2
    errors = (None, FULL, FULL, None, FULL, FULL, FULL)
    trainer, actors = make_trainer(tmp_path, cfg, actors=SlowDisk(*errors, opened=True))

    async def run() -> None:
        await taken(trainer, 5)
        assert left(tmp_path)[:1] == ["step_000001"] and trainer.saver._failed == 0
        await taken(trainer, 2)
        with pytest.raises(SaveFailed, match=r"step 7 could not be saved in `trainer.output_dir`.*space"):
            await taken(trainer, 1)

    played(trainer, run)
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


@pytest.mark.parametrize("steps", [1, 2])
def test_a_signal_waits_for_the_save_that_runs(tmp_path, steps):
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
    assert actors.log.count("written") == 1
    assert left(tmp_path)[0] == "step_000001" and left(tmp_path)[-1] == f"step_{trainer.version:06d}"
    assert (tmp_path / "checkpoints" / "LATEST").read_text().strip() == left(tmp_path)[-1]


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

    actors, made = Lost(opened=sealed), []

    def make():
        made.append(make_trainer(tmp_path, cfg, actors=actors)[0])
        return made[-1]

    if not sealed:
        may_seal.set()
    asyncio.run(run_to_end(make, actors, 1))
    assert [len(made), actors.restarted] == [2, 1] and made[-1].version == 4
    assert bool(actors.loaded) == sealed and left(tmp_path) == ["step_000002", "step_000004"]
    straight, wanted = make_trainer(tmp_path / "straight", cfg)
    whole(straight)
    assert tokens(actors)[-len(tokens(wanted)) + 2 * sealed :] == tokens(wanted)[2 * sealed :]
