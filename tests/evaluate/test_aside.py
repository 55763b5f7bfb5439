"""Evaluations at the side of a run, with in-process engines: what overlaps and what waits."""

from collections import Counter

import pytest

from dapo.evaluate.evaluation import Evaluation
from dapo.types import HeldOut
from tests.support.driver.asides import EVALUATED, Slots, evaluations, made, steps_of
from tests.support.driver.loops import some_mixed, tiny_config
from tests.support.fakes import FakeActors, FakeRewards, FakeRollouts, make_prompt
from tests.support.faulty_pools import run, turns


def batches(actors: FakeActors) -> list[list]:
    return [
        [(s.token_ids.tolist(), s.rollout_logprobs.tolist(), s.advantage) for part in b.minibatches for s in part]
        for b in actors.batches
    ]


def test_what_is_trained_is_the_same_with_and_without_evaluations(tmp_path):
    trainer, _, without = made(tmp_path / "without", evaluates=False)
    run(trainer.run())
    seen = []
    for seed in range(6):
        path = tmp_path / str(seed)
        trainer, rollouts, actors = made(path, seed=seed)
        run(trainer.run())
        assert batches(actors) == batches(without)
        assert steps_of(path) == steps_of(tmp_path / "without")
        assert list(evaluations(path)) == EVALUATED and rollouts.most_background > 0
        seen.append(evaluations(path))
    assert all(each == seen[0] for each in seen), "nor do evaluations depend on timing"


def test_log_probabilities_are_asked_for_in_training_alone(tmp_path):
    asked = {}

    class Asked(Slots):
        def generate(self, key, prompt, sampling, seeds, *, background=False, problem=None):
            asked.setdefault(key.startswith("eval-"), set()).add(sampling.logprobs)
            return super().generate(key, prompt, sampling, seeds, background=background, problem=problem)

    trainer, _, _ = made(tmp_path, rollouts=Asked())
    run(trainer.run())
    assert asked == {True: {False}, False: {True}}


def test_an_evaluation_runs_while_a_batch_is_collected_and_trained_and_is_over_before_the_sync(tmp_path):
    class Longer(Slots):
        async def generate(self, key, prompt, sampling, seeds, *, background=False, problem=None):
            responses = super().generate(key, prompt, sampling, seeds, background=background, problem=problem)
            async for each in responses:
                await turns(50 * key.startswith("eval-"))
                yield each

    trainer, rollouts, _ = made(tmp_path, rollouts=Longer())
    sync = trainer._pools.sync_weights

    async def syncing(version: int) -> None:
        rollouts.events.append(f"sync {version}")
        await sync(version)

    object.__setattr__(trainer._pools, "sync_weights", syncing)
    run(trainer.run())
    events = rollouts.events
    for version in (0, 2, 4):
        own = [n for n, event in enumerate(events) if event.startswith(f"eval-v{version}-") and "ended" not in event]
        ended = [n for n, event in enumerate(events) if event.startswith(f"eval-v{version}-") and "ended" in event]
        sync_before, sync_after = events.index(f"sync {version}"), events.index(f"sync {version + 1}")
        first_draw = next(n for n, event in enumerate(events) if event.startswith(f"v{version}-d"))
        assert len(own) == len(ended) == 5 and sync_before < first_draw < own[0] and max(ended) < sync_after
    updates = [n for n, event in enumerate(events) if event == "update"]
    overlapped = [
        any(start < n < events.index("updated", start) for start in updates)
        for n, event in enumerate(events)
        if event.startswith("eval-") and "ended" in event
    ]
    assert Counter(overlapped)[True] > 0, "the engines answer while the actors update"
    assert events[-1].startswith("eval-v5-"), "the last policy is evaluated when nothing else is left"


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_pump_and_the_evaluation_share_the_engines(tmp_path, staleness):
    trainer, _, actors = made(tmp_path, staleness=staleness, total=8)
    run(trainer.run())
    assert list(evaluations(tmp_path)) == [0, 2, 4, 6, 8] and len(actors.batches) == 8
    alone, _, _ = made(tmp_path / "alone", staleness=staleness, total=8)
    run(alone.run())
    whole = [{k: v for k, v in line.items()} for line in evaluations(tmp_path).values()]
    assert whole == list(evaluations(tmp_path / "alone").values())


def test_where_roles_share_gpus_it_is_over_before_the_update(tmp_path):
    trainer, rollouts, _ = made(tmp_path)
    trainer._cfg.trainer.colocate = "memory"
    run(trainer.run())
    updates = [n for n, event in enumerate(rollouts.events) if event == "update"]
    for start in updates:
        during = rollouts.events[start : rollouts.events.index("updated", start)]
        assert not [event for event in during if event.startswith("eval-")]
    assert list(evaluations(tmp_path)) == EVALUATED


def test_it_takes_what_is_spare_until_somebody_waits_for_it():
    class Given(FakeRollouts):
        capacity, free = 4, 0
        running = most = 0

        @property
        def spare(self) -> int:
            return self.free - self.running

        async def generate(self, key, prompt, sampling, seeds, *, background=False, problem=None):
            self.running += sampling.n
            self.most = max(self.most, self.running)
            async for each in super().generate(key, prompt, sampling, seeds):
                yield each
            self.running -= sampling.n

    async def body():
        rollouts = Given()
        cfg = tiny_config()
        sets = [HeldOut(name="", prompts=tuple(make_prompt(n) for n in range(6)), samples=(2,) * 5 + (20,))]
        evaluation = Evaluation(sets, rollouts, FakeRewards(some_mixed), cfg, version=0)
        evaluation.wake()
        await turns(30)
        assert not rollouts.seen, "nothing is spare"
        rollouts.free = 4
        evaluation.wake()
        await turns(100)
        assert len(rollouts.seen) == 5 and rollouts.most == 4, "one after the other, as slots become free"
        rollouts.free = 0
        evaluation.hurry()
        answered = await evaluation.answers()
        await evaluation.close()
        return rollouts, answered.sets[""]

    rollouts, groups = run(body())
    assert rollouts.most == 8, "two for each slot"
    assert [len(group.responses) for group in groups] == [2] * 5 + [20]
    assert len({response.text for response in groups[-1].responses}) == 20, "in parts, each with its own seeds"
