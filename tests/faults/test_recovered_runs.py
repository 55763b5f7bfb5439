"""Whole runs on fake pools whose actors fail train on what they would have without."""

import asyncio

import pyarrow.parquet as pq
import pytest

from dapo.faults.recovery import run_to_end
from dapo.pools import ActorsLost, BatchRefused, Updated
from dapo.report.log import read_metrics
from dapo.sampling.saved import FILE
from dapo.state.quarantine import QUARANTINE
from tests.support.driver.loops import make_trainer, tiny_config
from tests.support.fakes import FakeActors, FakeRollouts
from tests.support.faulty_pools import lost


class Failing(FakeActors):
    """Raises at update number k what `at` holds for it, once; an ActorsLost leaves nothing of the ranks. Gives no sign
    of life any more while the batch of step k is collected, once for each k of `idle`."""

    def __init__(self, at: dict[int, Exception], *, after: bool = False, idle: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.at, self.after, self.gone, self.idle = dict(at), after, False, set(idle)

    async def update(self, batch) -> Updated:
        assert not self.gone, "lost actors are asked"
        error = self.at.pop(self.version + 1, None)
        if error is None:
            return await super().update(batch)
        if self.after:
            await super().update(batch)
        if isinstance(error, ActorsLost):
            self.gone = True
        raise error

    async def save(self, directory: str, version: int) -> None:
        assert not self.gone, "lost actors are asked"
        await super().save(directory, version)

    async def until_lost(self) -> str:
        if self.version + 1 not in self.idle:
            return await super().until_lost()
        await asyncio.sleep(0)
        self.idle.remove(self.version + 1)
        self.gone = True
        return "rank 3 is gone"

    async def restart(self) -> None:
        await super().restart()
        self.gone = False


class Regenerating(FakeRollouts):
    """A group may come again under its name. Answers nothing to the first `stuck` prompts of evaluations."""

    stuck = 0

    async def generate(self, key, prompt, sampling, seeds, **how):
        self._stop.discard(key)
        if key.startswith("eval") and self.stuck:
            self.stuck -= 1
            await asyncio.Event().wait()
        async for each in super().generate(key, prompt, sampling, seeds, **how):
            yield each


def trained(actors: FakeActors) -> dict[int, list]:
    return {
        batch.version: [(s.token_ids.tolist(), s.advantage) for minibatch in batch.minibatches for s in minibatch]
        for batch in actors.batches
    }


def run_with(path, actors: FakeActors) -> int:
    """Runs to the end; returns how many trainers it took."""
    made = []

    def make():
        rollouts = Regenerating(seed=len(made), max_turns=9)
        made.append(make_trainer(path, tiny_config(total_steps=7), actors=actors, rollouts=rollouts)[0])
        return made[-1]

    asyncio.run(run_to_end(make, actors, 3))
    assert made[-1].version == 7
    return len(made)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, list]:
    actors = Failing({})
    assert run_with(tmp_path_factory.mktemp("straight"), actors) == 1
    found = trained(actors)
    assert sorted(found) == list(range(7))
    return found


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [[1], [4], [7], [1, 2, 6], [3, 4, 5]])
def test_a_run_that_loses_its_actors_trains_on_what_it_would_have(tmp_path, undisturbed, at, after):
    actors = Failing({number: lost(number) for number in at}, after=after)
    assert run_with(tmp_path, actors) == 1 + len(at)
    assert trained(actors) == undisturbed and actors.restarted == len(at)


@pytest.mark.parametrize("at", [[1], [7], [2, 3, 5]])
def test_a_run_of_which_batches_are_refused_trains_on_what_it_would_have(tmp_path, undisturbed, at):
    actors = Failing({number: BatchRefused("parity", "the engines compute something else") for number in at})
    assert run_with(tmp_path, actors) == 1
    assert trained(actors) == undisturbed
    entries = sorted((tmp_path / QUARANTINE).iterdir())
    assert [entry.name for entry in entries] == [f"step_{number - 1:06d}-parity" for number in at]
    for entry, number in zip(entries, at, strict=True):
        tokens = pq.read_table(entry / FILE)["token_ids"].to_pylist()
        assert sorted(tokens) == sorted(ids[3:] for ids, _ in undisturbed[number - 1])


@pytest.mark.parametrize("before", [(1,), (7,), (2, 3, 5)])
def test_ranks_that_are_lost_while_engines_generate_start_again_at_once(tmp_path, undisturbed, capsys, before):
    actors = Failing({}, idle=before)
    assert run_with(tmp_path, actors) == 1 + len(before)
    assert trained(actors) == undisturbed and actors.restarted == len(before)
    assert capsys.readouterr().err.count("rank 3 is gone") == len(before)


def test_a_signal_that_meets_the_loss_of_the_actors_ends_the_run(tmp_path):
    """A scheduler's signal reaches ranks too: that they die of it must not start them again."""
    moment = asyncio.Event()

    class Dying(Failing):
        async def update(self, batch) -> Updated:
            moment.set()
            await asyncio.sleep(0.01)
            return await super().update(batch)

    actors = Dying({1: lost()})
    trainer, _ = make_trainer(tmp_path, tiny_config(total_steps=3), actors=actors)

    async def signalled() -> None:
        running = asyncio.create_task(run_to_end(lambda: trainer, actors, 3))
        await moment.wait()
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(signalled())
    assert actors.restarted == 0


def test_ranks_that_are_lost_in_an_evaluation_start_again_and_it_begins_anew(tmp_path):
    actors, rollouts, cfg = Failing({}, idle=(1,)), Regenerating(), tiny_config(total_steps=2)
    rollouts.stuck, cfg.eval.before_train = 5, True
    running = run_to_end(lambda: make_trainer(tmp_path, cfg, actors=actors, rollouts=rollouts)[0], actors, 3)
    asyncio.run(asyncio.wait_for(running, 60))
    assert actors.restarted == 1 and actors.version == 2 and rollouts.stuck == 0
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "eval/accuracy" in line][0] == 0
