"""What is said of whole runs with slow parts: every phase, and no response is lost; the real trainer and stream."""

import asyncio
import time
from itertools import pairwise

import pytest

from dapo.report.progress import GENERATING, Moment, line_of, moment_of
from dapo.sampling.traffic import Traffic
from tests.support.clock import Clock
from tests.support.driver.loops import make_trainer, some_mixed, tiny_config
from tests.support.fakes import FakeActors, FakeRewards
from tests.support.faulty_pools import NarrowRollouts, run, turns


class Slow(FakeActors):
    """Takes some turns for everything."""

    async def update(self, batch):
        await turns(20)
        return await super().update(batch)

    async def save(self, directory, version):
        await turns(20)
        await super().save(directory, version)


class SlowRewards(FakeRewards):
    async def score(self, prompt, sample, response):
        await turns(30)
        return await super().score(prompt, sample, response)


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_phase_of_a_run_is_told_and_no_response_is_lost(tmp_path, clock: Clock, staleness: int) -> None:
    cfg = tiny_config(total_steps=5)
    cfg.filter_groups.max_staleness = staleness
    cfg.checkpoint.async_save = False

    class Counted(NarrowRollouts):
        """background: responses of evaluations."""

        background = 0

        async def generate(self, key, prompt, sampling, seeds, **how):
            aside = sampling.n if key.startswith("eval") else 0
            self.background += aside
            try:
                async for each in super().generate(key, prompt, sampling, seeds):
                    self.background -= bool(aside)
                    aside -= bool(aside)
                    yield each
            finally:
                self.background -= aside

    rollouts = Counted(max_turns=40)
    trainer, _ = make_trainer(tmp_path, cfg, rollouts=rollouts, actors=Slow())
    object.__setattr__(trainer._pools, "rewards", SlowRewards(some_mixed))
    trainer.stream._rewards = trainer._pools.rewards
    sync = trainer._pools.sync_weights

    async def slow_sync(version: int) -> None:
        await turns(20)
        await sync(version)

    object.__setattr__(trainer._pools, "sync_weights", slow_sync)
    seen: list[Moment] = []

    async def watched() -> None:
        task = asyncio.create_task(trainer.run())
        while not task.done():
            clock.now += 0.5
            seen.append(moment := moment_of(trainer, 5, clock.now))
            assert moment.running == rollouts.running - rollouts.background
            line_of(moment)
            time.sleep(1e-5)  # threads that save want the interpreter too
            await asyncio.sleep(0)
        task.result()

    run(watched())
    phases = {moment.phase for moment in seen}
    assert phases >= {GENERATING, "scoring", "updating", "syncing weights", "saving", "evaluating"}
    assert (seen[0].phase, seen[0].phase_s) == ("preparing", 0.0) and "in step 1/5 · preparing" == line_of(seen[0])
    assert [moment.step for moment in seen] == sorted(moment.step for moment in seen)
    assert {moment.per_s for moment in seen} == {12.5}, "what the engines say, whether responses have ended or not"
    assert {moment.step for moment in seen} == {1, 2, 3, 4, 5} and seen[-1].running == 0
    assert {moment.evaluation[0] for moment in seen if moment.evaluation} == {0, 2, 4, 5}
    full = [moment.evaluation for moment in seen if moment.evaluation and moment.evaluation[1] > 0]
    assert full and all(came <= total == 10 for _, came, total in full)
    assert any(moment.phase == "updating" and moment.running for moment in seen) == bool(staleness)
    assert all(moment.longest_s > 0 for moment in seen if moment.running and moment.phase_s > 20)
    assert any(later.ended < earlier.ended for earlier, later in pairwise(seen)), "a step counts anew"
    assert trainer.clock.since == {}


def test_a_group_that_is_cancelled_runs_no_more(clock: Clock) -> None:
    traffic = Traffic()
    traffic.start("a", 2)
    clock.now += 5
    traffic.start("b", 4)
    clock.now += 1
    traffic.end("b")
    assert (traffic.running, traffic.ended, traffic.longest_s(clock.now)) == (5, 1, 6.0)
    for _ in range(2):
        traffic.end("a")
    assert (traffic.running, traffic.longest_s(clock.now)) == (3, 1.0), "only its verdicts are waited for"
    traffic.open()
    traffic.close("b")
    assert (traffic.running, traffic.ended, traffic.longest_s(clock.now)) == (0, 0, 0.0)
