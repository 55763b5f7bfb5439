"""The save that ends a run, and what comes while it is written: it is written to its end, and the first error stays."""

import asyncio

import pytest

from dapo.faults.limit import TimeLimitReached
from dapo.faults.recovery import run_to_end
from tests.support.driver.loops import make_trainer, tiny_config
from tests.support.fakes import FakeActors
from tests.support.faulty_pools import turns


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
        pytest.param(None, 1, id="the loss of the head after a signal"),
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
