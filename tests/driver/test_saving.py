"""What a run saves, when it has to, and what it reads when it goes on."""

import asyncio
import threading
from dataclasses import replace

import pytest

from dapo.driver.saving import SaveFailed
from dapo.evaluate.evaluation import Evaluation
from dapo.faults.recovery import run_to_end
from dapo.pools import ActorsLost
from dapo.report.log import read_metrics
from dapo.sampling.budget import BudgetExhausted
from dapo.sampling.driver_state import DriverState, Due, owes_evaluation
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


def tokens(actors) -> list[list[tuple]]:
    """What each update trained on."""
    return [
        [(sequence.token_ids.tolist(), sequence.advantage) for minibatch in batch.minibatches for sequence in minibatch]
        for batch in actors.batches
    ]


def seen(trainer) -> list[str]:
    return trainer._pools.rollouts.seen


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


FULL = OSError(28, "No space left on device")


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


async def cancel_in(trainer, moment: asyncio.Event) -> None:
    """A signal, and what the program does about it."""
    running = asyncio.create_task(run_to_end(lambda: trainer, trainer._pools.actors, 0))
    await asyncio.wait_for(moment.wait(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def evaluations(path) -> list[int]:
    return [line["step"] for line in read_metrics(path / "metrics.jsonl") if "eval/accuracy" in line]


def step_lines(path) -> list[int]:
    return [line["step"] for line in read_metrics(path / "metrics.jsonl") if "actor/loss" in line]


@pytest.mark.parametrize("version", [2, 4, 5])
def test_an_evaluation_that_a_signal_cut_short_comes_after_the_restart(tmp_path, monkeypatch, version):
    """The one of step 5 is the last act of the run."""
    cfg = tiny_config(total_steps=5)
    cfg.checkpoint.every = 0
    straight, _ = make_trainer(tmp_path / "straight", cfg)
    asyncio.run(straight.run())
    first, _ = make_trainer(tmp_path, cfg)
    moment = asyncio.Event()

    answers = Evaluation.answers

    async def hang(evaluation):
        if evaluation.version == version:
            moment.set()
            await asyncio.Event().wait()
        return await answers(evaluation)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "answers", hang)
        asyncio.run(cancel_in(first, moment))
    assert version not in evaluations(tmp_path) and version in step_lines(tmp_path)
    directory = tmp_path / "checkpoints" / f"step_{version:06d}"
    assert DriverState.read(directory).due.evaluate and owes_evaluation(directory, tmp_path)
    second, _ = make_trainer(tmp_path, cfg)
    asyncio.run(second.run())
    second.saver.close()
    assert evaluations(tmp_path) == evaluations(tmp_path / "straight") == [0, 2, 4, 5]
    assert not owes_evaluation(directory, tmp_path)
    third, _ = make_trainer(tmp_path, cfg)
    asyncio.run(third.run())
    third.saver.close()
    assert evaluations(tmp_path) == [0, 2, 4, 5], "done once"


def test_a_step_that_a_signal_meets_in_its_update_has_its_line(tmp_path):
    first, actors = make_trainer(tmp_path, tiny_config(total_steps=5))
    moment = asyncio.Event()
    update = actors.update

    async def slow(batch):
        if batch.version == 2:
            moment.set()
            await turns(20)
        return await update(batch)

    actors.update = slow
    asyncio.run(cancel_in(first, moment))
    assert first.version == 3 and step_lines(tmp_path) == [1, 2, 3]
    second, _ = make_trainer(tmp_path, tiny_config(total_steps=5))
    asyncio.run(second.run())
    second.saver.close()
    assert step_lines(tmp_path) == [1, 2, 3, 4, 5]


def test_a_step_whose_weight_sync_fails_has_its_line(tmp_path):
    trainer, _ = make_trainer(tmp_path, tiny_config(total_steps=5))
    sync = trainer._pools.sync_weights

    async def broken(version: int) -> None:
        await sync(version)
        if version == 3:
            raise RuntimeError("engine 0 is gone")

    trainer._pools = replace(trainer._pools, sync_weights=broken)
    with pytest.raises(RuntimeError, match="engine 0 is gone"):
        asyncio.run(run_to_end(lambda: trainer, trainer._pools.actors, 0))
    trainer.saver.close()
    assert step_lines(tmp_path) == [1, 2, 3] and 3 in trainer.saver._store.steps()
