"""Whole runs on fake pools whose actors fail train on what they would have without."""

import asyncio
import itertools
import time

import pyarrow.parquet as pq
import pytest

from dapo.driver.recovery import run_to_end
from dapo.pools import ActorsLost, BatchRefused, Updated
from dapo.report.log import read_metrics
from dapo.state.batches import Batches
from dapo.state.groups import FILE
from dapo.state.quarantine import QUARANTINE
from tests.support.driver.loops import make_trainer, tiny_config, tokens, whole
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

    async def generate(self, request):
        self._stop.discard(request.key)
        if request.key.startswith("eval") and self.stuck:
            self.stuck -= 1
            await asyncio.Event().wait()
        async for each in super().generate(request):
            yield each


def trained(actors: FakeActors) -> dict[int, list]:
    return {
        batch.version: [(s.token_ids.tolist(), s.advantage) for minibatch in batch.minibatches for s in minibatch]
        for batch in actors.batches
    }


def run_with(path, actors: FakeActors, *, copies: int = 0) -> int:
    """Runs to the end; returns how many trainers it took. copies: in memory."""
    made = []
    cfg = tiny_config(total_steps=7)
    cfg.checkpoint.memory_copies = copies

    def make():
        rollouts = Regenerating(seed=len(made), max_turns=9)
        made.append(make_trainer(path, cfg, actors=actors, rollouts=rollouts)[0])
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


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [[1], [4], [7], [1, 2, 6], [3, 4, 5]])
def test_with_copies_in_memory_it_repeats_no_step_either(tmp_path, undisturbed, at, after):
    actors = Failing({number: lost(number) for number in at}, after=after)
    assert run_with(tmp_path, actors, copies=1) == 1 + len(at)
    assert trained(actors) == undisturbed and len(actors.batches) == 7 + after * len(at)
    assert actors.restored == [number - 1 for number in at if number > 1] and not actors.loaded


@pytest.mark.parametrize("method", ["keep", "restore"])
@pytest.mark.parametrize("error", [lost(), RuntimeError("no copy is whole")])
def test_without_a_whole_copy_in_memory_the_checkpoint_is_read(tmp_path, undisturbed, monkeypatch, method, error):
    actors = Failing({6: lost()})

    async def fail(*args) -> None:
        if method == "restore" or actors.version == 5:
            monkeypatch.undo()
            actors.gone = isinstance(error, ActorsLost)
            raise error
        return await FakeActors.keep(actors, *args)

    monkeypatch.setattr(actors, method, fail)
    run_with(tmp_path, actors, copies=1)
    assert trained(actors) == undisturbed
    if method == "restore":
        assert not actors.restored and [path.split("/")[-2] for path in actors.loaded] == ["step_000004"]
    else:
        assert not actors.loaded and actors.restored == ([4, 5] if isinstance(error, ActorsLost) else [4])


def quarantined(path) -> dict[str, list]:
    entries = sorted((path / QUARANTINE).iterdir())
    return {entry.name: sorted(pq.read_table(entry / FILE)["token_ids"].to_pylist()) for entry in entries}


def responses(batch: list) -> list:
    return sorted(ids[3:] for ids, _ in batch)


REFUSED = BatchRefused("parity", "the engines compute something else")


@pytest.mark.parametrize("at", [[1], [7], [2, 3, 5]])
def test_batches_that_are_refused_are_drawn_again_with_other_tokens(tmp_path, undisturbed, at):
    actors = Failing(dict.fromkeys(at, REFUSED))
    assert run_with(tmp_path, actors) == 1
    first, found = at[0] - 1, trained(actors)
    assert [found[v] for v in range(first)] == [undisturbed[v] for v in range(first)]
    assert responses(found[first]) != responses(undisturbed[first]) and sorted(found) == list(range(7))
    entries = quarantined(tmp_path)
    assert list(entries) == [f"step_{number - 1:06d}-parity" for number in at]
    assert entries[f"step_{first:06d}-parity"] == responses(undisturbed[first])


@pytest.mark.parametrize("held", [False, True], ids=["in the journal", "in the checkpoint"])
@pytest.mark.parametrize("turns", [0, 12, 25])
def test_a_refused_batch_does_not_come_back_after_a_kill(tmp_path, undisturbed, held, turns):
    """What comes in its place is what would have come without the kill, in the middle of which it was."""

    def make(path, actors: FakeActors):
        return make_trainer(path, tiny_config(total_steps=7), actors=actors, rollouts=Regenerating())[0]

    straight, again = Failing({3: REFUSED}), Failing({})
    whole(make(tmp_path / "straight", straight))
    path = tmp_path / "run"
    if held:
        ends = Failing({3: RuntimeError("the run ends with a batch in hand")})
        with pytest.raises(RuntimeError, match="in hand"):
            asyncio.run(run_to_end(lambda: make(path, ends), ends, 0))
    refusing = Failing({3: REFUSED})
    refused = make(path, refusing)

    async def killed_after_the_refusal() -> None:
        await refused.resume()
        while not (path / QUARANTINE).exists():
            await refused.step()
        running = asyncio.create_task(refused.step())
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(killed_after_the_refusal())
    refused.saver.journal.close()
    whole(make(path, again))
    wanted, found = trained(straight), trained(again)
    assert found == {version: wanted[version] for version in range(2, 7)}
    assert responses(found[2]) != responses(undisturbed[2])


def test_batches_that_ended_the_run_do_not_begin_the_next_one(tmp_path):
    class Refusing(Failing):
        async def update(self, batch) -> Updated:
            self.batches.append(batch)
            raise REFUSED

    met, found = Refusing({}), Failing({})
    trainer, _ = make_trainer(tmp_path, tiny_config(total_steps=1), actors=met, rollouts=Regenerating())
    with pytest.raises(BatchRefused):
        asyncio.run(run_to_end(lambda: trainer, met, 0))
    whole(make_trainer(tmp_path, tiny_config(total_steps=1), actors=found, rollouts=Regenerating())[0])
    batches = [sorted(map(str, each)) for each in (*tokens(met), *tokens(found))]
    assert len(batches) == 4 and all(one != other for one, other in itertools.combinations(batches, 2))


class Poisoned(Failing):
    """Dies of one batch: the first that is trained from policy version `at_version`."""

    def __init__(self, at_version: int) -> None:
        super().__init__({})
        self.at_version, self.poison, self.met = at_version, None, 0

    async def update(self, batch) -> Updated:
        found = [sequence.token_ids.tolist() for minibatch in batch.minibatches for sequence in minibatch]
        if batch.version == self.at_version:
            self.poison = self.poison or found
        if found == self.poison:
            self.met, self.gone = self.met + 1, True
            raise lost()
        return await super().update(batch)


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize(("version", "allowed"), [(0, 5), (2, 5), (3, 5), (3, 0), (3, 1)])
def test_a_batch_that_loses_the_ranks_twice_is_set_aside(tmp_path, undisturbed, version, allowed, journal):
    """Behind a checkpoint (2) and between two (3); with fewer restarts than it takes, over several starts."""
    cfg, actors, errors, made = tiny_config(total_steps=7), Poisoned(version), [], []
    cfg.checkpoint.journal = journal

    def make():
        made.append(make_trainer(tmp_path, cfg, actors=actors, rollouts=Regenerating(seed=len(made)))[0])
        return made[-1]

    for _ in range(3):
        try:
            asyncio.run(run_to_end(make, actors, allowed))
            break
        except ActorsLost as error:
            errors.append(str(error))
            asyncio.run(actors.restart())
    assert actors.met == 2 and len(made) == 3 and len(errors) == max(0, 2 - allowed)
    assert all(QUARANTINE in error for error in errors)
    assert quarantined(tmp_path) == {f"step_{version:06d}-lost": responses(undisturbed[version])}
    found = trained(actors)
    assert [found[v] for v in range(version)] == [undisturbed[v] for v in range(version)]
    assert responses(found[version]) != responses(undisturbed[version]) and sorted(found) == list(range(7))


def test_a_batch_that_was_generated_ahead_is_drawn_again_under_other_seeds(tmp_path):
    """Its draws started before the version that its update starts from, and start there again after a restart."""
    cfg, actors = tiny_config(total_steps=5), Poisoned(1)
    cfg.filter_groups.max_staleness, cfg.checkpoint.journal = 1, False
    rollouts = [Regenerating() for _ in range(5)]
    running = run_to_end(lambda: make_trainer(tmp_path, cfg, actors=actors, rollouts=rollouts.pop())[0], actors, 3)
    asyncio.run(running)
    assert actors.met == 2 and sorted(trained(actors)) == list(range(5))


@pytest.mark.parametrize(
    "where", ["collecting", "saving", "syncing", "another batch", "a batch that was trained meanwhile"]
)
def test_losses_elsewhere_set_no_batch_aside(tmp_path, undisturbed, where):
    class Elsewhere(Failing):
        left = 2

        def lose(self, here: str, version: int, at: int) -> bool:
            self.gone = here == where and version == at and self.left > 0
            self.left -= self.gone
            return self.gone

        async def save(self, directory: str, version: int) -> None:
            if self.lose("saving", version, 2):
                raise lost()
            await super().save(directory, version)

        async def until_lost(self) -> str:
            return "rank 3 is gone" if self.lose("collecting", self.version, 2) else await super().until_lost()

        async def update(self, batch) -> Updated:
            updated = await super().update(batch)
            if where == "a batch that was trained meanwhile" and self.version == 3 and self.left == 2:
                self.left, self.at = 0, {4: lost(), 3: lost()}  # in step 4, and in step 3 when it comes again
            return updated

    at = {"another batch": (3, 4), "a batch that was trained meanwhile": (3,)}.get(where, ())
    actors = Elsewhere({number: lost(number) for number in at})

    class Synced:
        def append(self, version: int) -> None:
            if actors.lose("syncing", version, 3):
                raise lost()

    def make():
        cfg = tiny_config(total_steps=7)
        return make_trainer(tmp_path, cfg, actors=actors, rollouts=Regenerating(), synced=Synced())[0]

    asyncio.run(run_to_end(make, actors, 9))
    assert actors.restarted == (3 if "meanwhile" in where else 2)
    assert trained(actors) == undisturbed and not (tmp_path / QUARANTINE).exists()


@pytest.mark.parametrize("before", [(1,), (7,), (2, 3, 5)])
def test_ranks_that_are_lost_while_engines_generate_start_again_at_once(tmp_path, undisturbed, capsys, before):
    actors = Failing({}, idle=before)
    assert run_with(tmp_path, actors) == 1 + len(before)
    assert trained(actors) == undisturbed and actors.restarted == len(before)
    assert capsys.readouterr().err.count("rank 3 is gone") == len(before)


def test_a_batch_is_written_before_the_next_trainer_writes_it(tmp_path, monkeypatch):
    events: list[str] = []

    def slowly(self, step, groups, visits) -> None:
        time.sleep(0.1)
        events.append("written")

    class Told(Failing):
        async def restart(self) -> None:
            events.append("restart")
            await super().restart()

    monkeypatch.setattr(Batches, "_write", slowly)
    assert run_with(tmp_path, Told({1: lost()})) == 2
    assert events[:3] == ["written", "restart", "written"]


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
