"""Runs that crash and go on: what is generated again, what comes from the journal, what is drawn anew."""

import asyncio
import threading
from dataclasses import replace

import pytest

from dapo.faults.recovery import run_to_end
from dapo.report.log import read_metrics
from dapo.sampling.budget import BudgetExhausted
from tests.support.driver.loops import make_trainer, tiny_config
from tests.support.driver.saved_runs import seen, tokens
from tests.support.fakes import FakeRollouts
from tests.support.faulty_pools import turns


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("crash", [(1, 0), (1, 9), (1, 20), (3, 5), (3, 30), (4, 12), (6, 3)])
def test_after_a_crash_at_staleness_0_the_run_is_the_same_and_generates_less(tmp_path, journal, crash):
    """The process dies some turns of the event loop after a step, wherever it is then; nothing is saved."""
    cfg = tiny_config(total_steps=7)
    cfg.checkpoint.journal = journal
    straight, wanted = make_trainer(tmp_path / "straight", cfg)
    asyncio.run(straight.run())
    first, _ = make_trainer(tmp_path / "crashed", cfg)

    async def until_it_dies() -> set[int]:
        await first._resume()
        while first.version < crash[0]:
            await first.step()
        running = asyncio.create_task(first.step())
        await turns(crash[1])
        running.cancel()
        first.saver.journal.close()
        return {group.draw.index for group, _ in first._buffer.held()}

    scored = asyncio.run(until_it_dies())
    second, found = make_trainer(tmp_path / "crashed", cfg)
    asyncio.run(second.run())
    assert tokens(found) == tokens(wanted)[7 - len(found.batches) :]
    again = {f"v{first.version}-d{index}" for index in scored} & set(seen(second))
    if first.version % 2 == 0 and journal:
        assert not again
    elif first.version == crash[0] and crash[1] >= 20:
        assert again, "the test shows nothing"
    second.saver.close()


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("crash", [3, 17, 40, 64, 90])
def test_after_crashes_above_staleness_0_each_draw_is_trained_once_and_none_too_old(tmp_path, staleness, crash):
    cfg = tiny_config(total_steps=8)
    cfg.filter_groups.max_staleness = staleness
    cfg.checkpoint.every = 2
    cfg.eval.every = 0
    used: dict[int, list[int]] = {}  # draws by version of the update

    for death in (crash, crash + 11, 10**6):
        trainer, actors = make_trainer(tmp_path, cfg)
        collect = trainer.stream.collect

        async def noted(trainer=trainer, collect=collect):
            collected = await collect()
            used[trainer.version] = [group.draw.index for group in collected.drawn]
            return collected

        trainer.stream.collect = noted

        async def until_it_dies(trainer=trainer, death=death) -> None:
            running = asyncio.create_task(trainer.run())
            for _ in range(death):
                await asyncio.sleep(0.0005)
                if running.done():
                    running.result()
                    return
            running.cancel()
            await asyncio.wait([running])  # a save under way ends; a cancelled event loop is no kill
            trainer.saver.close()

        asyncio.run(until_it_dies())
        ages = [int(s.staleness.max()) for batch in actors.batches for m in batch.minibatches for s in m]
        assert all(0 <= age <= staleness for age in ages)
    assert sorted(used) == list(range(8))
    drawn = [index for version in range(8) for index in used[version]]
    assert drawn == list(range(len(drawn)))


def test_a_crash_before_the_first_checkpoint_keeps_the_groups_of_the_untrained_policy(tmp_path):
    cfg = tiny_config(total_steps=1)
    cfg.filter_groups.max_num_gen_batches = 1
    first, _ = make_trainer(tmp_path, cfg, verdict=lambda prompt, sample, response: 1.0)
    with pytest.raises(BudgetExhausted):
        asyncio.run(first.run())
    first.saver.close()
    assert not (tmp_path / "checkpoints").exists()
    cfg.filter_groups.max_num_gen_batches = 0
    second, actors = make_trainer(tmp_path, cfg)
    lines: list[str] = []
    second._say = lines.append
    asyncio.run(second.run())
    assert lines[0] == "resuming from 12 groups of the journal"
    assert not {f"v0-d{index}" for index in range(12)} & set(seen(second)) and actors.batches
    second.saver.close()


def test_without_a_journal_an_old_one_is_removed(tmp_path):
    """Else a later run could take its groups for its own."""
    cfg = tiny_config(total_steps=2)
    first, _ = make_trainer(tmp_path, cfg)
    asyncio.run(first.run())
    first.saver.close()
    assert list((tmp_path / "journal").iterdir())
    cfg.checkpoint.journal = False
    second, _ = make_trainer(tmp_path, cfg)
    asyncio.run(second.run())
    assert not list((tmp_path / "journal").iterdir())


def test_the_journal_keeps_what_the_kept_checkpoints_need(tmp_path):
    cfg = tiny_config(total_steps=9)
    trainer, _ = make_trainer(tmp_path, cfg)
    trainer.saver._store._keep = 2
    asyncio.run(trainer.run())
    trainer.saver.close()
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == [
        "after_000008.log",
        "after_000009.log",
    ]
    assert sorted(trainer.saver._store.steps()) == [8, 9]


def test_a_run_that_is_cancelled_while_it_opens_its_journal_ends_in_order(tmp_path, monkeypatch):
    trainer, _ = make_trainer(tmp_path, tiny_config(total_steps=2))
    opening, may_open = threading.Event(), threading.Event()
    start, before = threading.Thread.start, set(threading.enumerate())

    def slowly(thread: threading.Thread) -> None:
        if thread.name == "journal":
            opening.set()
            assert may_open.wait(30)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slowly)

    async def cancelled() -> None:
        running = asyncio.create_task(run_to_end(lambda: trainer, trainer._pools.actors, 0))
        while not opening.is_set():
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.sleep(0.01)
        may_open.set()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert set(threading.enumerate()) <= before, "the journal is closed"


@pytest.mark.parametrize("ends", [["signal"], ["kill"], ["signal", "kill"], ["kill", "signal", "signal"]])
def test_a_run_that_ends_in_mid_step_gives_the_update_no_second_budget(tmp_path, ends):
    """One prompt in 13 is usable, and the budget ends each step before its batch is full."""
    cfg = tiny_config(total_steps=2)
    cfg.checkpoint.every, cfg.eval.every, cfg.eval.before_train, cfg.eval.after_train = 0, 0, False, False
    cfg.filter_groups.max_num_gen_batches, cfg.filter_groups.on_budget = 2, "train_partial"

    def trainer(path):
        def rare(prompt, sample, response) -> float:
            return float(prompt.id % 13 == 0 and sample % 2 == 1)

        return make_trainer(path, cfg, verdict=rare)

    def drawn(path) -> list[tuple[int, float, float]]:
        lines = read_metrics(path / "metrics.jsonl")
        return [(line["step"], line["buffer/drawn"], line["buffer/trained"]) for line in lines]

    async def until_it_ends(one, how: str, held: int) -> None:
        if how == "kill":
            one.saver.is_behind = lambda version: False
        running = asyncio.create_task(run_to_end(lambda: one, one._pools.actors, 0))
        while len(one.stream.buffer.held()) < held:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])

    straight, wanted = trainer(tmp_path / "straight")
    asyncio.run(run_to_end(lambda: straight, wanted, 0))
    for number, how in enumerate(ends):
        asyncio.run(until_it_ends(trainer(tmp_path / "ended")[0], how, 6 * (number + 1)))
    last, found = trainer(tmp_path / "ended")
    asyncio.run(run_to_end(lambda: last, found, 0))
    assert drawn(tmp_path / "straight")[0][1:] == (24, 1), "the budget, and a batch that is not full"
    assert drawn(tmp_path / "ended") == drawn(tmp_path / "straight") and tokens(found) == tokens(wanted)


@pytest.mark.parametrize("where", ["checkpoint", "journal"])
def test_groups_that_mean_something_else_by_now_are_drawn_again(tmp_path, where):
    """Which a changed prompt, sampling or reward setting makes of them, where it was accepted."""
    cfg = tiny_config(total_steps=1)
    cfg.filter_groups.max_num_gen_batches = 1
    first, _ = make_trainer(tmp_path, cfg, verdict=lambda prompt, sample, response: 1.0)
    with pytest.raises(BudgetExhausted):
        asyncio.run(first.run())
    if where == "checkpoint":
        asyncio.run(first.save())
    first.saver.close()
    known = first.stream.buffer.draws.drawn
    cfg.filter_groups.max_num_gen_batches = 0
    second, actors = make_trainer(tmp_path, cfg)
    second.saver._store.keeps_groups = False
    found: list[int] = []

    async def run() -> None:
        await second._resume()
        found.append(len(second.stream.buffer.held()))
        await second.step()
        await second.stream.close()

    asyncio.run(run())
    second.saver.close()
    assert known == 12 and found == [0]
    assert [f"v0-d{index}" for index in range(12)] == seen(second)[:12], "each of them again, in order"
    straight, wanted = make_trainer(tmp_path / "straight", cfg)
    asyncio.run(straight.run())
    straight.saver.close()
    assert tokens(actors) == tokens(wanted)


class HalfFailed(FakeRollouts):
    """The rollout function fails at sample 3 of each group, which has no text then."""

    async def generate(self, key, prompt, sampling, seeds, **how):
        async for sample, response in super().generate(key, prompt, sampling, seeds, **how):
            yield sample, replace(response, finish_reason="error", text="") if sample == 3 else response


@pytest.mark.parametrize("where", ["checkpoint", "journal"])
def test_a_response_whose_rollout_function_failed_stays_unscorable(tmp_path, where):
    """A verifier says 0 of it, and a group of three right ones would become one with a wrong one."""
    cfg = tiny_config(total_steps=1)
    cfg.filter_groups.max_num_gen_batches = 1

    def trainer():
        right = lambda prompt, sample, response: float(response.text != "")  # noqa: E731
        return make_trainer(tmp_path, cfg, verdict=right, rollouts=HalfFailed())[0]

    def scores(one) -> list[list[tuple[float, str]]]:
        held = [group for group, _ in one.stream.buffer.held()]
        return [[(score.accuracy, score.failure) for score in group.scores] for group in held]

    first = trainer()
    with pytest.raises(BudgetExhausted):
        asyncio.run(first.run())
    if where == "checkpoint":
        asyncio.run(first.save())
    first.saver.close()
    second = trainer()
    asyncio.run(second._resume())
    second.saver.close()
    assert len(scores(second)) == 12 and second.stream.buffer.draws.usable == 0
    for group in scores(second):
        assert [accuracy for accuracy, _ in group[:3]] == [1.0] * 3 and group[3][1] == "rollout"
    assert str(scores(second)) == str(scores(first))
