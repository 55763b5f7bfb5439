"""Runs one run, from a claimed output directory to stopped processes: the only module that composes the pools.

    Config ─▶ preflight ─▶ data, Ray ─▶ engines, reward workers, actors (started side by side) ─▶ Trainer.run ─▶ stopped

However a run ends (last step, Ctrl-C, a signal, a failure anywhere), what was trained is saved and every process ends.
"""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.metrics import Gauge

from dapo.config.paths import resolve_path
from dapo.config.schema import Config
from dapo.data.held_out import load_held_out
from dapo.data.prompts import DataReport, fingerprint, load_prompts
from dapo.evaluate.evaluation import Answered, Evaluation
from dapo.faults.head import HeadLost, while_reachable
from dapo.faults.limit import TimeLimit
from dapo.faults.recovery import run_to_end
from dapo.faults.signals import Stop
from dapo.pools import Pools
from dapo.preflight import preflight
from dapo.report.console import end_at_once, hearing_warnings, say, warn
from dapo.report.log import MetricsLogger
from dapo.report.progress import Progress
from dapo.report.sinks import sinks_of
from dapo.report.watchdog import Watchdog, waiting
from dapo.state.checkpoint import CheckpointStore
from dapo.state.run_dir import RunDirectory
from dapo.store.samples import SampleStore
from dapo.trainer import Trainer
from dapo.types import HeldOut, Prompt
from workers.actor import ActorPool
from workers.cluster import Placement, connect, count_gpus, engine_args, head, resolve_device, reward_model_device
from workers.reward import RewardPool
from workers.reward_model import RewardModelPool
from workers.rollout import RolloutPool
from workers.weight_sync import WeightSync

STOP_GRACE_S = 3.0


async def train_until_signal(cfg: Config, run_dir: RunDirectory, store: CheckpointStore) -> None:
    """Trains as `train` does. Raises KeyboardInterrupt after Ctrl-C, CancelledError after another signal, and LeaseLost
    when another run has taken the directory over."""
    task = asyncio.current_task()
    assert task is not None
    stop = Stop(task)
    stop.install()
    loop = asyncio.get_running_loop()

    def lost() -> None:
        loop.call_soon_threadsafe(task.cancel)

    run_dir.when_lost(lost)
    try:
        await train(cfg, run_dir, store, stop=stop)
    except asyncio.CancelledError:
        run_dir.check()
        if stop.first == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise


async def train(
    cfg: Config,
    run_dir: RunDirectory,
    store: CheckpointStore,
    rollouts: RolloutPool | None = None,
    stop: Stop | None = None,
) -> None:
    """Trains up to `trainer.total_steps`.

    rollouts: engines that outlive the run (`build_rollouts`, inside `ray_cluster`); None: Ray and engines of its own.
    stop: catches signals.

    Raises:
        ValueError, RuntimeError: what is wrong with the input, or what failed, with the remedy.
    """
    began = time.monotonic()
    make_paths_absolute(cfg)
    preflight(cfg)
    # Both take seconds; those of Ray are spent waiting.
    loading = asyncio.create_task(asyncio.to_thread(load_data, cfg, run_dir.started))
    progress = Progress(cfg.trainer.total_steps, cfg.logging.watchdog_s)
    cluster = ray_cluster(cfg) if rollouts is None else nullcontext()
    with Watchdog(cfg.logging.watchdog_s, before=progress.look), cluster:
        if stop is not None:
            stop.install()  # once more: Ray has put a handler of its own in place
        with waiting("the prompts to be read and tokenized"):
            prompts, held_out, data_fingerprint = await loading
        run_dir.check_data(data_fingerprint)
        store.keeps_groups = not run_dir.accepted
        async with build_pools(cfg, rollouts) as pools:
            say(f"ready after {time.monotonic() - began:.0f} s")
            samples = SampleStore(run_dir.path, cfg.logging, warn=warn, guard=run_dir.check)
            samples.begin(asdict(cfg), pools.gpus)
            logger = MetricsLogger(run_dir.path, sinks_of(cfg, run_dir.path, Gauge), samples)
            limit = TimeLimit(cfg.trainer.max_hours, began)
            try:
                async with while_reachable(*head(cfg.trainer.ray_address)):
                    await pools.actors.check_shared(*run_dir.token())
                    with hearing_warnings(lambda line: logger.event("warning", line)), progress:
                        made = partial(Trainer, cfg, pools, prompts, held_out, store, logger, say=say, limit=limit)
                        await run_to_end(lambda: progress.of(made()), pools.actors, cfg.actor.max_restarts)
            except HeadLost as error:
                logger.close()
                run_dir.release()
                end_at_once(str(error))  # Ray's own way to end processes waits for the head
            finally:
                logger.close()


def make_paths_absolute(cfg: Config) -> None:
    """Makes paths absolute: remote workers run in a directory of Ray's, where a relative path means nothing."""
    cfg.model.path = resolve_path(cfg.model.path)
    for spec in cfg.reward.functions:
        if spec.path.endswith(".py"):
            spec.path = str(Path(spec.path).expanduser().absolute())


def load_data(cfg: Config, today: datetime | None = None) -> tuple[list[Prompt], list[HeldOut], str]:
    """Loads training prompts, held-out sets, and the fingerprint of the former.

    today: the date for chat templates that write one; None: the real one. Raises ValueError: see
    `dapo.data.prompts.load_prompts`.
    """
    tokenizer = _tokenizer(cfg)
    prompts, report = load_prompts(
        cfg.data.train_files,
        tokenizer,
        max_prompt_length=cfg.data.max_prompt_length,
        max_contradictory=cfg.data.max_contradictory,
        key="data.train_files",
        today=today,
    )
    _tell("data.train_files", report)
    held_out = load_held_out(cfg, tokenizer, today=today, told=_tell)
    return prompts, held_out, fingerprint(prompts, tokenizer)


def _tokenizer(cfg: Config) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)


def _tell(key: str, report: DataReport) -> None:
    say(
        f"{key}: {report.rows} rows, {report.duplicates} duplicates, {report.contradictory} contradictory, "
        f"{report.too_long} longer than `data.max_prompt_length`, {report.kept} prompts"
    )


async def evaluate(
    cfg: Config, begun: Callable[[int], None] = lambda answers: None, answered: Callable[[int], None] = lambda n: None
) -> Answered:
    """Answers the held-out prompts with the model at `model.path`: with engines and reward workers, without actors.

    begun: called with the number of answers to come; answered: with the number of those that came. Raises as `train`
    does, and before anything is started where the input is wrong.
    """
    task = asyncio.current_task()
    assert task is not None
    make_paths_absolute(cfg)
    preflight(cfg)
    held_out = load_held_out(cfg, _tokenizer(cfg), told=_tell)
    cfg.actor.num_workers, cfg.trainer.colocate = 0, False  # neither GPUs nor memory are kept for actors
    with Watchdog(cfg.logging.watchdog_s), ray_cluster(cfg):
        Stop(task).install()
        device = resolve_device(cfg.trainer.device)
        placement = Placement(cfg, device, warn=warn)
        engines, rewards = _create_rollouts(cfg, placement), _create_rewards(cfg, placement, device)

        async def rejoin(number: int) -> None:  # an engine that starts again has loaded the weights that all serve
            engines.admit((number,))

        engines.keeper.rejoin = rejoin
        evaluation = Evaluation(held_out, engines, rewards, cfg, version=0, answered=answered)
        try:
            start = engines.start(cfg.model.path, engine_args(cfg, device))
            ready, _ = await asyncio.gather(rewards.start(cfg.rollout.start_timeout_s), start)
            say(ready)
            begun(sum(sum(one.samples) for one in held_out))
            evaluation.hurry()
            return await evaluation.answers()
        finally:
            await evaluation.close()
            rewards.stop()
            await engines.stop(STOP_GRACE_S)


@contextmanager
def ray_cluster(cfg: Config) -> Iterator[None]:
    """Joins or starts Ray, and leaves or ends it."""
    # The waits on Ray that a failure or signal cancels would be reported one by one at exit, each with a traceback.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    with waiting("Ray to start, or to be joined"):
        connect(cfg.trainer.ray_address, worker_logs=cfg.logging.worker_logs)
    try:
        yield
    finally:
        ray.shutdown()


@asynccontextmanager
async def build_pools(cfg: Config, rollouts: RolloutPool | None = None) -> AsyncIterator[Pools]:
    """Starts all workers at the same time, and stops them at the end.

    rollouts: engines that are already up and stay up, from `build_rollouts`; the first weight sync gives them the
    actors' weights, whatever they served before.
    """
    device = resolve_device(cfg.trainer.device)
    placement = Placement(cfg, device, warn=warn)
    engines = _create_rollouts(cfg, placement) if rollouts is None else rollouts
    actors = ActorPool(cfg, device, placement.actors)
    rewards = _create_rewards(cfg, placement, device)

    async def start_engines() -> None:
        if rollouts is None:
            await engines.start(cfg.model.path, engine_args(cfg, device))

    async def start_others() -> None:
        ready, _ = await asyncio.gather(rewards.start(cfg.rollout.start_timeout_s), actors.start())
        say(ready)

    try:
        if cfg.trainer.colocate:  # an engine measures what memory is free; actors that load meanwhile would mislead it
            await start_engines()
            await start_others()
        else:
            await asyncio.gather(start_engines(), start_others())
        sync = WeightSync(actors, engines, cfg)
        engines.keeper.rejoin = sync.rejoin
        gpus, work = count_gpus(cfg, device), engines.work() | {"reward workers": rewards.unscored}
        yield Pools(
            rollouts=engines, rewards=rewards, actors=actors, sync_weights=sync, weights=sync.lock, gpus=gpus, work=work
        )
    finally:
        actors.close()
        rewards.stop()
        if rollouts is None:
            await engines.stop(STOP_GRACE_S)


@asynccontextmanager
async def build_rollouts(cfg: Config) -> AsyncIterator[RolloutPool]:
    """Starts the engines alone, for several runs one after the other (`train(cfg, rollouts)`); stopped at the end.

    Raises:
        ValueError: on GPUs, which one placement group per run hands to engines and actors together.
    """
    device = resolve_device(cfg.trainer.device)
    if device != "cpu":
        raise ValueError(
            f"engines that outlive a run need `trainer.device` cpu, and it is {device}; set trainer.device=cpu, or "
            "run each configuration on its own with dapo.main_ppo"
        )
    engines = _create_rollouts(cfg, Placement(cfg, device))
    try:
        await engines.start(resolve_path(cfg.model.path), engine_args(cfg, device))
        yield engines
    finally:
        await engines.stop(STOP_GRACE_S)


def engine_needs(cfg: Config) -> dict[str, Any]:
    """Returns what `build_rollouts` starts engines with, by name: runs that share engines must agree on it.

    vLLM's seed is not among it: every response is a request with a seed of its own.
    """
    keys = ("num_engines", "cpu_threads", "start_timeout_s", "timeout_s")
    rollout = {f"rollout.{key}": value for key, value in asdict(cfg.rollout).items() if key in keys}
    arguments = {f"engine argument {name}": value for name, value in engine_args(cfg, "cpu").items() if name != "seed"}
    return {"model.path": resolve_path(cfg.model.path), **rollout, **arguments}


def _create_rollouts(cfg: Config, placement: Placement) -> RolloutPool:
    return RolloutPool(placement.rollout(), cfg.rollout, warn=warn, release=placement.release_engine)


def _create_rewards(cfg: Config, placement: Placement, device: str) -> RewardPool:
    model = None
    if cfg.reward.model.path:
        where = reward_model_device(cfg, device)
        model = RewardModelPool(cfg.reward.model, placement.reward_model(), device=where, warn=warn)
    return RewardPool(
        placement.rewards(), cfg.reward, max_response_length=cfg.data.max_response_length, model=model, warn=warn
    )
