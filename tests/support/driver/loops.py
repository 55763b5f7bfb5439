"""Streams and trainers of a small run on in-process pools, for tests of the loop."""

import asyncio

from dapo.config.schema import Config
from dapo.driver.session import Session
from dapo.pools import Pools
from dapo.report.log import MetricsLogger
from dapo.sampling.stream import GroupStream
from dapo.state.checkpoint import CheckpointStore
from dapo.types import Collected, HeldOut, Sampling
from tests.support.fakes import FakeActors, FakeRewards, FakeRollouts, make_prompt
from tests.support.faulty_pools import collect, turns

PROMPTS = [make_prompt(number) for number in range(40)]

SETTINGS = Sampling(n=4, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=32)

FULL = OSError(28, "No space left on device")


def some_mixed(prompt, sample, response) -> float:
    """Every third prompt is never solved, the others by odd samples."""
    return float(prompt.id % 3 != 0 and sample % 2 == 1)


async def step(stream: GroupStream, version: int) -> Collected:
    """Collects a batch, and trains on it."""
    collected = await collect(stream, version)
    stream.buffer.trained()
    return collected


def tiny_config(**trainer) -> Config:
    cfg = Config()
    cfg.data.train_batch_size, cfg.data.gen_batch_size = 4, 12
    cfg.data.max_response_length = 32
    cfg.rollout.n, cfg.actor.ppo_mini_batch_size = 4, 2
    cfg.eval.every, cfg.eval.n, cfg.checkpoint.every = 2, 2, 2
    cfg.checkpoint.hf_export = False
    for key, value in trainer.items():
        setattr(cfg.trainer, key, value)
    return cfg


def make_trainer(
    tmp_path,
    cfg,
    *,
    verdict=some_mixed,
    synced=None,
    rollouts=None,
    actors=None,
    samples=None,
    prompts=PROMPTS,
    limit=None,
):
    rollouts, actors = rollouts or FakeRollouts(), actors or FakeActors()
    tmp_path.mkdir(exist_ok=True)

    async def sync(version: int) -> None:
        rollouts.version = version
        if synced is not None:
            synced.append(version)

    pools = Pools(rollouts=rollouts, rewards=FakeRewards(verdict), actors=actors, sync_weights=sync)
    store = CheckpointStore(tmp_path / "checkpoints", keep=0)
    logger = MetricsLogger(tmp_path, store=samples)
    held_out = HeldOut(name="", prompts=tuple(PROMPTS[:5]), samples=(cfg.eval.n,) * 5)
    trainer = Session(cfg, pools, prompts, [held_out], store, logger, say=lambda line: None, limit=limit)
    return trainer, actors


def whole(trainer: Session) -> None:
    """Trains to the end."""
    asyncio.run(trainer.run())
    trainer.saver.close()


async def cancelled(trainer, version: int, count: int) -> asyncio.Task:
    """A step that is cancelled so many turns of the event loop after the run has come to a version."""
    await trainer.resume()
    while trainer.version < version:
        await trainer.step()
    running = asyncio.create_task(trainer.step())
    await turns(count)
    running.cancel()
    return running


async def killed(trainer: Session, version: int, count: int) -> set[int]:
    """The process dies there and saves nothing. Returns the draws whose groups it had."""
    await cancelled(trainer, version, count)
    trainer.saver.journal.close()
    return {group.draw.index for group, _ in trainer.buffer.held()}


def tokens(actors: FakeActors) -> list[list[tuple]]:
    """What each update trained on."""
    return [
        [(sequence.token_ids.tolist(), sequence.advantage) for minibatch in batch.minibatches for sequence in minibatch]
        for batch in actors.batches
    ]


def seen(trainer: Session) -> list[str]:
    return trainer._pools.rollouts.seen
