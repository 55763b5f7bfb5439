"""Evaluations at the side of a run, with in-process engines: what overlaps and waits, is dropped or begins anew."""

import asyncio
import time
from collections import Counter

import pytest

from dapo.driver.recovery import run_to_end
from dapo.driver.session import Session
from dapo.evaluation.held_out import Evaluation
from dapo.ground.time_limit import TimeLimit, TimeLimitReached
from dapo.pools import BatchRefused
from dapo.report.log import read_metrics
from dapo.state.driver_state import owes_evaluation
from dapo.types import HeldOut
from tests.support.driver.loops import make_trainer, some_mixed, tiny_config
from tests.support.fakes import FakeActors, FakeRewards, FakeRollouts, make_prompt
from tests.support.faulty_pools import run, turns

EVALUATED = [0, 2, 4, 5]


class Slots(FakeRollouts):
    """Engines of 12 slots. events: what starts and ends, in order. most_background: responses at once."""

    capacity = 12

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.events: list[str] = []
        self.most_background = 0
        self._left: dict[str, tuple[int, bool]] = {}

    def _load(self, background: bool) -> int:
        return sum(left for left, aside in self._left.values() if background or not aside)

    def room(self, n: int) -> int:
        return max(0, (self.capacity + n - self._load(background=False)) // n)

    @property
    def spare(self) -> int:
        return max(0, self.capacity - self._load(background=True))

    async def generate(self, request):
        key = request.key
        self._stop.discard(key)  # an abort means the one that runs
        self._left[key] = (request.sampling.n, request.background)
        if request.background:
            self.most_background = max(self.most_background, self._load(True) - self._load(False))
        self.events.append(key)
        try:
            async for each in super().generate(request):
                yield each
        finally:
            del self._left[key]
            self.events.append(f"{key} ended")


class Slow(FakeActors):
    """Takes many turns to update, and tells when."""

    def __init__(self, rollouts: Slots, turns_: int = 300) -> None:
        super().__init__()
        self.rollouts, self.turns = rollouts, turns_

    async def update(self, batch):
        self.rollouts.events.append("update")
        await turns(self.turns)
        self.rollouts.events.append("updated")
        return await super().update(batch)


def made(path, *, seed: int = 0, staleness: int = 0, evaluates: bool = True, total: int = 5, **more):
    cfg = tiny_config(total_steps=total)
    cfg.filter_groups.max_staleness, cfg.checkpoint.every = staleness, 0
    if not evaluates:
        cfg.eval.every, cfg.eval.before_train, cfg.eval.after_train = 0, False, False
    rollouts = more.pop("rollouts", None) or Slots(seed)
    actors = more.pop("actors", None) or Slow(rollouts)
    synced = more.pop("synced", [])
    trainer, _ = make_trainer(path, cfg, rollouts=rollouts, actors=actors, synced=synced, **more)
    return trainer, rollouts, actors


def evaluations(path) -> dict[int, dict]:
    return {line["step"]: line for line in read_metrics(path / "metrics.jsonl") if "eval/accuracy" in line}


def steps_of(path) -> list[dict]:
    lines = [line for line in read_metrics(path / "metrics.jsonl") if "actor/loss" in line]
    return [{k: v for k, v in line.items() if not k.startswith(("perf/", "ledger/"))} for line in lines]


def batches(actors: FakeActors) -> list[list]:
    return [
        [(s.token_ids.tolist(), s.rollout_logprobs.tolist(), s.advantage) for part in b.minibatches for s in part]
        for b in actors.batches
    ]


async def to_its_end(trainer: Session) -> None:
    await run_to_end(lambda: trainer, trainer._pools.actors, 0)


class Late(Slots):
    """Answers to evaluations take many turns."""

    turns = 50

    async def generate(self, request):
        async for each in super().generate(request):
            await turns(self.turns * request.key.startswith("eval-"))
            yield each


class Stuck(Slots):
    """Never ends an answer to the evaluation of `version_stuck`."""

    version_stuck = 2

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()

    async def generate(self, request):
        if request.key.startswith(f"eval-v{self.version_stuck}-"):
            self.reached.set()
            while request.key not in self._stop:
                await asyncio.sleep(0.001)
        async for each in super().generate(request):
            yield each


def test_what_is_trained_is_the_same_with_and_without_evaluations(tmp_path):
    trainer, _, without = made(tmp_path / "without", evaluates=False)
    run(trainer.run())
    seen = []
    for seed in range(4):
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
        def generate(self, request):
            asked.setdefault(request.key.startswith("eval-"), set()).add(request.sampling.logprobs)
            return super().generate(request)

    trainer, _, actors = made(tmp_path, rollouts=Asked(), staleness=1, total=8)
    run(trainer.run())
    assert asked == {True: {False}, False: {True}}
    assert list(evaluations(tmp_path)) == [0, 2, 4, 6, 8] and len(actors.batches) == 8, "at staleness 1 too"


def test_an_evaluation_runs_while_a_batch_is_collected_and_trained_and_is_over_before_the_sync(tmp_path):
    trainer, rollouts, _ = made(tmp_path, rollouts=Late())
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


def test_where_roles_share_gpus_it_is_over_before_the_update(tmp_path):
    trainer, rollouts, _ = made(tmp_path)
    trainer._cfg.trainer.colocate = "time"
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

        async def generate(self, request):
            self.running += request.sampling.n
            self.most = max(self.most, self.running)
            async for each in super().generate(request):
                yield each
            self.running -= request.sampling.n

    async def body():
        rollouts = Given()
        sets = [HeldOut(name="", prompts=tuple(make_prompt(n) for n in range(6)), samples=(2,) * 5 + (20,))]
        evaluation = Evaluation(sets, rollouts, FakeRewards(some_mixed), tiny_config(), version=0)
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


def test_a_signal_in_an_update_does_not_wait_for_the_evaluation(tmp_path, capsys):
    trainer, rollouts, actors = made(tmp_path, rollouts=Stuck())

    async def body():
        running = asyncio.create_task(to_its_end(trainer))
        await rollouts.reached.wait()
        while len(actors.batches) < 3:  # the update after the evaluation began
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(body())
    assert trainer.version == 3 and not trainer.saver.is_behind(3)
    assert "the evaluation of step 2 was cut short and has no result" in capsys.readouterr().err
    assert list(evaluations(tmp_path)) == [0] and [line["step"] for line in steps_of(tmp_path)] == [1, 2, 3]
    again, _, _ = made(tmp_path)
    run(again.run())
    assert list(evaluations(tmp_path)) == [0, 4, 5], "its policy is gone"


@pytest.mark.parametrize("left_s", [-1.0, 0.3])
def test_the_last_evaluation_is_left_by_the_time_limit_and_made_up_for(tmp_path, left_s):
    """It would go on until the scheduler ends the process. left_s: of the limit when the last step is saved."""
    limit = TimeLimit(1.0, time.monotonic())
    trainer, rollouts, actors = made(tmp_path, rollouts=Stuck(), limit=limit)
    rollouts.version_stuck = 5
    save = actors.save

    async def late(directory, version):
        limit._began = time.monotonic() - 3600 + left_s
        await save(directory, version)

    actors.save = late
    with pytest.raises(TimeLimitReached, match=r"`trainer.max_hours` \(1\)"):
        run(to_its_end(trainer))
    assert rollouts.reached.is_set() and time.monotonic() - limit._began < 3600 + 5
    assert list(evaluations(tmp_path)) == [0, 2, 4] and trainer.saver._store.steps() == [5]
    assert owes_evaluation(trainer.saver._store.latest(), tmp_path)
    again, _, resting = made(tmp_path)
    run(again.run())
    assert list(evaluations(tmp_path)) == EVALUATED and not resting.batches


def test_engines_that_are_lost_in_an_update_end_the_evaluation_and_not_the_run(tmp_path, capsys):
    """One that starts again has to wait for the weights of the update, and cannot answer with those before."""
    trainer, rollouts, actors = made(tmp_path, rollouts=Stuck())
    update, sync = actors.update, trainer._pools.sync_weights

    async def losing(batch):
        rollouts.serving = batch.version != 2
        return await update(batch)

    async def syncing(version):
        rollouts.serving = True
        await sync(version)

    actors.update = losing
    object.__setattr__(trainer._pools, "sync_weights", syncing)
    run(trainer.run())
    assert trainer.version == 5 and list(evaluations(tmp_path)) == [0, 4, 5]
    assert "the evaluation of step 2 was cut short" in capsys.readouterr().err


def test_a_failed_evaluation_ends_the_run_and_saves_what_was_trained(tmp_path):
    class AfterTheUpdate(Slots):
        async def generate(self, request):
            while request.key.startswith("eval-v2-") and trainer.version < 3:
                await asyncio.sleep(0)
            async for each in super().generate(request):
                yield each

    class Failing(FakeRewards):
        async def score(self, prompt, sample, response):
            if response.policy_versions[0].version == 2 and trainer.version == 3:
                raise RuntimeError("the verifier broke")
            return await super().score(prompt, sample, response)

    trainer, _, _ = made(tmp_path, rollouts=AfterTheUpdate())
    object.__setattr__(trainer._pools, "rewards", Failing(some_mixed))
    with pytest.raises(RuntimeError, match="the verifier broke"):
        run(to_its_end(trainer))
    assert trainer.version == 3 and not trainer.saver.is_behind(3)


def test_answers_of_another_version_are_an_error(tmp_path):
    trainer, rollouts, _ = made(tmp_path, rollouts=Late())

    async def body():
        running = asyncio.create_task(trainer.run())
        while not any(event.startswith("v2-d") for event in rollouts.events):
            await asyncio.sleep(0)
        rollouts.version = 7
        await running

    with pytest.raises(RuntimeError, match="evaluation of policy version 2 were sampled by versions .*7"):
        run(body())


def test_an_evaluation_begins_anew_when_its_weights_may_have_been_wrong(tmp_path):
    """A batch that the actors refuse is a sign of that."""
    trainer, rollouts, actors = made(tmp_path, rollouts=Stuck())
    update, begun = actors.update, []

    async def refusing(batch):
        if batch.version == 2 and not begun:
            await rollouts.reached.wait()
            begun.append(trainer.evaluations._evaluation)
            rollouts.version_stuck = -1
            raise BatchRefused("parity", "the engines sample from other probabilities")
        if batch.version == 2:
            begun.append(trainer.evaluations._evaluation)
        return await update(batch)

    actors.update = refusing
    run(trainer.run())
    assert list(evaluations(tmp_path)) == EVALUATED and evaluations(tmp_path)[2]["eval/samples"] == 10
    assert len(begun) == 2 and begun[0] is not begun[1], "what was stuck has not ended by itself"
