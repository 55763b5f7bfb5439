"""Runs that end and go on: what is generated again, what comes from the journal, what is drawn anew."""

import asyncio
from dataclasses import replace

import pytest

from dapo.sampling.budget import BudgetExhausted
from tests.support.driver.loops import make_trainer, seen, tiny_config, tokens, whole
from tests.support.fakes import FakeRollouts


def all_right(prompt, sample, response) -> float:
    return 1.0


def exhausted(path, saved: bool, **how):
    """A run of one update whose budget of twelve draws gave no usable group."""
    cfg = tiny_config(total_steps=1)
    cfg.filter_groups.max_num_gen_batches = 1
    trainer, _ = make_trainer(path, cfg, **how)
    with pytest.raises(BudgetExhausted):
        asyncio.run(trainer.run())
    if saved:
        asyncio.run(trainer.save())
    trainer.saver.close()
    return trainer


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("crash", [3, 40, 90])
def test_after_crashes_above_staleness_0_each_draw_is_trained_once_and_none_too_old(tmp_path, staleness, crash):
    cfg = tiny_config(total_steps=8)
    cfg.filter_groups.max_staleness, cfg.eval.every = staleness, 0
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
    exhausted(tmp_path, False, verdict=all_right)
    assert not (tmp_path / "checkpoints").exists()
    second, actors = make_trainer(tmp_path, tiny_config(total_steps=1))
    lines: list[str] = []
    second._say = lines.append
    whole(second)
    assert lines[0] == "resuming from 12 groups of the journal"
    assert not {f"v0-d{index}" for index in range(12)} & set(seen(second)) and actors.batches


def test_the_journal_keeps_what_the_kept_checkpoints_need_and_goes_with_its_setting(tmp_path):
    cfg = tiny_config(total_steps=9)
    trainer, _ = make_trainer(tmp_path, cfg)
    trainer.saver._store._keep = 2
    whole(trainer)
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == ["after_000008.log", "after_000009.log"]
    assert sorted(trainer.saver._store.steps()) == [8, 9]
    cfg.checkpoint.journal = False
    whole(make_trainer(tmp_path, cfg)[0])
    assert not list((tmp_path / "journal").iterdir())


@pytest.mark.parametrize("saved", [True, False], ids=["checkpoint", "journal"])
def test_groups_that_mean_something_else_by_now_are_drawn_again(tmp_path, saved):
    known = exhausted(tmp_path, saved, verdict=all_right).stream.buffer.draws.drawn
    second, actors = make_trainer(tmp_path, tiny_config(total_steps=1))
    second.saver._store.keeps_groups = False

    async def run() -> int:
        await second.resume()
        held = len(second.stream.buffer.held())
        await second.step()
        await second.stream.close()
        return held

    assert known == 12 and asyncio.run(run()) == 0
    second.saver.close()
    assert [f"v0-d{index}" for index in range(12)] == seen(second)[:12], "each of them again, in order"
    straight, wanted = make_trainer(tmp_path / "straight", tiny_config(total_steps=1))
    whole(straight)
    assert tokens(actors) == tokens(wanted)


class HalfFailed(FakeRollouts):
    """The rollout function fails at sample 3 of each group, which has no text then."""

    async def generate(self, request):
        async for sample, response in super().generate(request):
            yield sample, replace(response, finish_reason="error", text="") if sample == 3 else response


@pytest.mark.parametrize("saved", [True, False], ids=["checkpoint", "journal"])
def test_a_response_whose_rollout_function_failed_stays_unscorable(tmp_path, saved):
    """A verifier says 0 of it, and a group of three right ones would become one with a wrong one."""
    pools = {"verdict": lambda prompt, sample, response: float(response.text != ""), "rollouts": HalfFailed()}

    def scores(one) -> list[list[tuple[float, str]]]:
        held = [group for group, _ in one.stream.buffer.held()]
        return [[(score.accuracy, score.failure) for score in group.scores] for group in held]

    first = exhausted(tmp_path, saved, **pools)
    second, _ = make_trainer(tmp_path, tiny_config(total_steps=1), **pools)
    asyncio.run(second.resume())
    second.saver.close()
    assert len(scores(second)) == 12 and second.stream.buffer.draws.usable == 0
    for group in scores(second):
        assert [accuracy for accuracy, _ in group[:3]] == [1.0] * 3 and group[3][1] == "rollout"
    assert str(scores(second)) == str(scores(first))
