"""The trainer's loop on in-process pools: what a step does, resume, ends."""

import asyncio
import json
from dataclasses import replace

import pytest

from dapo.data.order import PromptOrder
from dapo.driver.recovery import run_to_end
from dapo.ground.clock import PhaseClock
from dapo.sampling.budget import BudgetExhausted
from dapo.sampling.buffer import OversamplingBuffer
from dapo.sampling.stream import GroupStream
from tests.support.driver.loops import PROMPTS, SETTINGS, make_trainer, tiny_config, tokens
from tests.support.fakes import FakeActors, FakeRewards, FakeRollouts
from tests.support.faulty_pools import turns


class CutOffRollouts(FakeRollouts):
    """Every response of an odd draw runs into the cap."""

    async def generate(self, request):
        reason = "length" if int(request.key.partition("-d")[2]) % 2 else "stop"
        async for sample, response in super().generate(request):
            yield sample, replace(response, finish_reason=reason)


@pytest.mark.parametrize("enable", [False, True])
def test_a_group_that_overlong_filtering_empties_takes_no_place_in_the_batch(tmp_path, enable):
    cfg = tiny_config(total_steps=3)
    cfg.reward.overlong_filtering.enable = enable
    cfg.eval.every, cfg.eval.before_train, cfg.eval.after_train = 0, False, False
    trainer, actors = make_trainer(tmp_path, cfg, rollouts=CutOffRollouts())
    asyncio.run(trainer.run())
    sizes = [sum(len(minibatch) for minibatch in batch.minibatches) for batch in actors.batches]
    assert sizes == [cfg.data.train_batch_size * cfg.rollout.n] * 3
    trained = [line["buffer/mixed"] - line["buffer/trained"] for line in lines(tmp_path)]
    assert (sum(trained) > 0) == enable


def lines(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_the_algorithm_without_evaluations_saves_and_limits_trains_on_the_same(tmp_path):
    session, wanted = make_trainer(tmp_path / "session", tiny_config(total_steps=3))
    asyncio.run(session.run())
    alone, actors = make_trainer(tmp_path / "alone", tiny_config(total_steps=3))

    async def steps():
        for _ in range(3):
            await alone._trainer.step()
        await alone.stream.close()

    asyncio.run(steps())
    assert tokens(actors) == tokens(wanted) and len(actors.batches) == 3


def test_the_loop_updates_syncs_evaluates_and_saves(tmp_path):
    synced: list[int] = []
    trainer, actors = make_trainer(tmp_path, tiny_config(total_steps=5), synced=synced)
    asyncio.run(trainer.run())
    assert trainer.version == 5
    assert synced == [0, 1, 2, 3, 4, 5]
    assert [batch.version for batch in actors.batches] == [0, 1, 2, 3, 4]
    assert [len(batch.minibatches) for batch in actors.batches] == [2] * 5
    assert [line["step"] for line in lines(tmp_path) if "eval/accuracy" in line] == [0, 2, 4, 5]
    restarted = [line["step"] for line in lines(tmp_path) if line.get("perf/restarted_reward_workers") == 2]
    assert restarted == [1, 2, 3, 4, 5]
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert saved == ["step_000002", "step_000004", "step_000005"]


def test_a_resumed_run_continues_as_if_it_had_not_stopped(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    trainer, straight = make_trainer(whole, tiny_config(total_steps=6))
    asyncio.run(trainer.run())
    first, _ = make_trainer(parts, tiny_config(total_steps=3))
    asyncio.run(first.run())
    second, resumed = make_trainer(parts, tiny_config(total_steps=6))
    asyncio.run(second.run())
    assert resumed.loaded and [batch.version for batch in resumed.batches] == [3, 4, 5]

    def tokens(batch):
        return [sequence.token_ids.tolist() for minibatch in batch.minibatches for sequence in minibatch]

    assert [tokens(batch) for batch in resumed.batches] == [tokens(batch) for batch in straight.batches[3:]]

    def of_the_seed(path):
        return [{k: v for k, v in line.items() if not k.startswith(("perf/", "ledger/"))} for line in lines(path)]

    steps = [line for line in of_the_seed(whole) if "buffer/drawn" in line]
    assert steps == [line for line in of_the_seed(parts) if "buffer/drawn" in line]


def test_a_cancelled_run_finishes_the_update_that_was_under_way(tmp_path):
    trainer, actors = make_trainer(tmp_path, tiny_config(total_steps=100))
    started = asyncio.Event()

    async def slow_update(batch):
        started.set()
        await asyncio.sleep(0.05)
        return await FakeActors.update(actors, batch)

    actors.update = slow_update

    async def run_and_cancel():
        task = asyncio.create_task(trainer.run())
        await started.wait()
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run_and_cancel())
    assert trainer.version == 1 and len(actors.batches) == 1
    assert trainer.saver.is_behind(trainer.version)


def exhausted(folder, cfg, verdict) -> list[int]:
    """A run that its budget ends; returns the draws that it holds. `cfg` has no budget afterwards."""
    cfg.filter_groups.max_num_gen_batches = 1
    first, _ = make_trainer(folder, cfg, verdict=verdict)
    with pytest.raises(BudgetExhausted):
        asyncio.run(run_to_end(lambda: first, first._pools.actors, 0))
    cfg.filter_groups.max_num_gen_batches = 0
    return [group.draw.index for group, _ in first.buffer.held()]


def test_groups_of_a_checkpoint_are_scored_anew(tmp_path):
    """The verdicts of a run that stopped may be why it stopped."""
    cfg = tiny_config(total_steps=1)
    held = exhausted(tmp_path, cfg, lambda prompt, sample, response: 1.0)
    second, resumed = make_trainer(tmp_path, cfg, verdict=lambda prompt, sample, response: float(sample % 2))
    asyncio.run(second.run())
    assert held and not {f"v0-d{index}" for index in held} & set(second._pools.rollouts.seen)
    assert second.buffer.draws.counts["all_correct"] == 0 and resumed.batches


def test_above_staleness_0_generation_goes_on_during_the_update_within_its_bound(tmp_path):
    cfg = tiny_config(total_steps=12)
    cfg.filter_groups.max_staleness = 1
    cfg.checkpoint.batches = 0  # a wait for a disk would let generation go on before the update
    trainer, actors = make_trainer(tmp_path, cfg)
    rollouts = trainer._pools.rollouts
    grown: list[int] = []

    async def slow_update(batch):
        before = len(rollouts.seen)
        for _ in range(40):
            await asyncio.sleep(0)
        grown.append(len(rollouts.seen) - before)
        return await FakeActors.update(actors, batch)

    actors.update = slow_update
    asyncio.run(trainer.run())
    assert trainer.version == 12 and max(grown) > 0
    staleness = [s.staleness for batch in actors.batches for minibatch in batch.minibatches for s in minibatch]
    assert {int(value) for tokens in staleness for value in tokens} == {0, 1}
    assert trainer.buffer.draws.counts["trained"] == 12 * cfg.data.train_batch_size


def test_an_exhausted_budget_saves_the_accepted_groups_and_the_next_run_uses_them(tmp_path):
    def one_in_ten(prompt, sample, response) -> float:
        return float(prompt.id % 10 == 0 and sample % 2 == 1)

    cfg = tiny_config(total_steps=1)
    held = exhausted(tmp_path, cfg, one_in_ten)
    assert held == list(range(12)) and (tmp_path / "checkpoints" / "step_000000").is_dir()
    second, resumed = make_trainer(tmp_path, cfg, verdict=one_in_ten)
    asyncio.run(second.run())
    assert not {f"v0-d{index}" for index in held} & set(second._pools.rollouts.seen)
    straight, wanted = make_trainer(tmp_path / "straight", cfg, verdict=one_in_ten)
    asyncio.run(straight.run())
    for found, whole in zip(resumed.batches[0].minibatches, wanted.batches[0].minibatches, strict=True):
        for one, other in zip(found, whole, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist() and one.advantage == other.advantage


@pytest.mark.parametrize(("staleness", "more"), [(0, False), (1, True), (2, True)])
def test_engines_that_ran_dry_get_work_as_soon_as_they_serve_the_next_version(staleness, more):
    """Evaluation and saving come before the next `collect`."""
    buffer = OversamplingBuffer(train_batch_size=4, max_in_flight=12, max_staleness=staleness)
    rollouts = FakeRollouts()
    rewards = FakeRewards(lambda prompt, sample, _: float(sample % 2))
    buffer.rate.restore([1e6, 1e6])  # no more than what can be trained on is started ahead
    order = PromptOrder(PROMPTS, seed=0, shuffle=True)
    stream = GroupStream(order, buffer, rollouts, rewards, SETTINGS, seed=7, clock=PhaseClock())

    async def update() -> tuple[int, int]:
        await stream.collect()
        await turns(200)
        assert buffer.in_flight == 0, "they ran dry"
        before = len(rollouts.seen)
        buffer.trained()
        stream.serving(1)
        await turns(20)
        await stream.close()
        return before, len(rollouts.seen)

    before, after = asyncio.run(update())
    assert (after > before) == more
