"""Executes one run, from a claimed output directory to stopped processes (`dapo.driver.fleet` starts them).

    Config ─▶ preflight ─▶ data, Ray ─▶ engines, reward workers, actors (started side by side) ─▶ Session.run ─▶ stopped

However a run ends (last step, Ctrl-C, a signal, a failure), what was trained is saved and every process is stopped.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path

from ray.util.metrics import Gauge

from dapo.algorithm.own.loading import digests, make_absolute
from dapo.config.derived import halve_roles
from dapo.config.paths import resolve_path
from dapo.config.schema import Config
from dapo.data.origins import origins
from dapo.data.prompts import DataReport, fingerprint
from dapo.data.sources import load_held_out, load_train
from dapo.data.tokenizer import check_rows, load_tokenizer
from dapo.driver import notes
from dapo.driver.fleet import build_pools, ray_cluster
from dapo.driver.preflight import preflight
from dapo.driver.progress import Progress
from dapo.driver.recovery import run_to_end
from dapo.driver.session import Session
from dapo.evaluation.held_out import Answered, Evaluation
from dapo.ground.console import end_at_once, hearing_warnings, say, warn
from dapo.ground.signals import Stop
from dapo.ground.time_limit import TimeLimit
from dapo.ground.watchdog import Watchdog, waiting
from dapo.pools import Pools
from dapo.report.log import MetricsLogger
from dapo.report.sinks.choice import sinks_of
from dapo.report.store.samples import SampleStore
from dapo.state.batches import check_age, steps_kept
from dapo.state.checkpoint import CheckpointStore
from dapo.state.run_dir import RunDirectory
from dapo.turns.loading import file_of_function
from dapo.types import HeldOut, Prompt
from dapo.workers.cluster import head
from dapo.workers.gcs_watch import HeadLost, while_reachable
from dapo.workers.rollout import RolloutPool

# Net allocations until Python looks for cycles, by default 700. Steps make none, and with 1,024 engines to look through
# all that running responses keep alive took half of the driver's time.
COLLECT_AT = 100_000


async def train_until_signal(
    cfg: Config, run_dir: RunDirectory, store: CheckpointStore, since: float, until: int | None = None
) -> None:
    """Trains as `train` does. Raises KeyboardInterrupt after Ctrl-C, CancelledError after another signal, LeaseLost
    when another run took the directory."""
    task = asyncio.current_task()
    assert task is not None
    stop = Stop(task)
    stop.install()
    try:
        with cancelled_when_lost(run_dir, task):
            await train(cfg, run_dir, store, stop=stop, until=until, since=since)
    except asyncio.CancelledError:
        if stop.first == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise


@contextmanager
def cancelled_when_lost(run_dir: RunDirectory, task: "asyncio.Task[object]") -> Iterator[None]:
    """Cancels the task once another run takes the directory over, and raises LeaseLost in place of CancelledError."""
    loop = asyncio.get_running_loop()

    def lost() -> None:
        loop.call_soon_threadsafe(task.cancel)

    run_dir.when_lost(lost)
    try:
        yield
    except asyncio.CancelledError:
        run_dir.check()
        raise


async def train(
    cfg: Config,
    run_dir: RunDirectory,
    store: CheckpointStore,
    rollouts: RolloutPool | None = None,
    stop: Stop | None = None,
    until: int | None = None,
    since: float | None = None,
) -> None:
    """Trains up to `trainer.total_steps`, or to step `until`. rollouts: engines that outlive the run (inside
    `ray_cluster`); None: starts Ray and its own engines. stop: catches signals. since: the time (`time.monotonic()`)
    from which `trainer.max_hours` counts; None: now. Raises ValueError or RuntimeError for wrong input or a failure,
    with the remedy."""
    progress = Progress(cfg.trainer.total_steps, cfg.logging.watchdog_s)
    with progress, Watchdog(cfg.logging.watchdog_s, before=progress.look):
        await _train(cfg, run_dir, store, rollouts, stop, until, since, progress)


async def _train(
    cfg: Config,
    run_dir: RunDirectory,
    store: CheckpointStore,
    rollouts: RolloutPool | None,
    stop: Stop | None,
    until: int | None,
    since: float | None,
    progress: Progress,
) -> None:
    began, given = time.monotonic(), asdict(cfg)
    make_paths_absolute(cfg)
    with waiting("model and functions to be loaded and checked"):
        preflight(cfg)
    await asyncio.sleep(0.001)  # hears a signal of the meantime; Ray's start, below, blocks this loop
    own = digests(cfg) | file_of_function(cfg.rollout.function)
    run_dir.check_own(own)
    if cfg.trainer.only != "both":
        until = _halve(cfg, until)
    # Both take seconds; starting Ray is mostly waiting.
    loading = asyncio.create_task(asyncio.to_thread(load_data, cfg, run_dir.started))
    with ray_cluster(cfg) if rollouts is None else nullcontext():
        if stop is not None:
            stop.install()  # again: Ray has installed its own handler
        with waiting("the prompts to be read and tokenized"):
            prompts, held_out, data_fingerprint = await loading
            inputs = await asyncio.to_thread(origins, cfg) | own
        run_dir.check_data(data_fingerprint)
        for line in run_dir.record_inputs(inputs):
            warn(line)
        store.keeps_groups = not run_dir.accepted and cfg.trainer.only != "train"
        store.keeps_history = run_dir.same_prompts and cfg.trainer.only != "train"
        if not run_dir.same_prompts and cfg.data.curriculum != "uniform":
            warn("the prompts are others than before: `data.curriculum` begins anew, without what was known of them")
        async with build_pools(cfg, rollouts) as pools:
            say(f"ready after {time.monotonic() - began:.0f} s")
            samples = SampleStore(run_dir.path, cfg.logging, warn=warn, guard=run_dir.check)
            samples.begin(given, pools.gpus)
            logger = MetricsLogger(run_dir.path, sinks_of(cfg, run_dir.path, Gauge), samples)
            logger.event("inputs", "\n".join(f"{key}: {text}" for key, text in inputs.items()))
            limit = TimeLimit(cfg.trainer.max_hours, began if since is None else since)
            try:
                async with while_reachable(*head(cfg.trainer.ray_address)):
                    await pools.actors.check_shared(*run_dir.token())
                    run_dir.begin()
                    with hearing_warnings(lambda line: logger.event("warning", line)):
                        made = partial(
                            Session, cfg, pools, prompts, held_out, store, logger, say=say, limit=limit, until=until
                        )
                        async with scaled(pools, run_dir.path):
                            await run_to_end(lambda: progress.of(made()), pools.actors, cfg.actor.max_restarts)
            except HeadLost as error:
                logger.close()
                run_dir.release()
                end_at_once(str(error))  # Ray's own way to end processes waits for the head
            finally:
                progress.over()
                logger.close()


@asynccontextmanager
async def scaled(pools: Pools, directory: Path) -> AsyncIterator[None]:
    """Lets engines join and leave in the block."""
    following = None if pools.scale is None else asyncio.ensure_future(pools.scale(directory))
    try:
        yield
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait([following])


def _halve(cfg: Config, until: int | None) -> int | None:
    """Removes what half a run does not need; returns the last step that it can reach."""
    cfg.data.val_files = []
    for source in cfg.data.sources:
        source.val_files = []
    halve_roles(cfg)
    if cfg.trainer.only == "rollout":
        return until
    last, wanted = steps_kept(Path(cfg.data.batches))[-1], cfg.trainer.total_steps if until is None else until
    if last < wanted:
        say(f"`data.batches` ends with step {last}, and so does this run")
    check_age(cfg, min(last, wanted))
    return min(last, wanted)


def make_paths_absolute(cfg: Config) -> None:
    """Makes paths absolute: remote workers run in another directory."""
    cfg.model.path = resolve_path(cfg.model.path)
    own = [spec for source in cfg.data.sources for spec in source.functions]
    for spec in (*cfg.reward.functions, *own):
        if spec.path.endswith(".py"):
            spec.path = str(Path(spec.path).expanduser().absolute())
    function = cfg.rollout.function
    if function.path.endswith(".py"):
        function.path = str(Path(function.path).expanduser().absolute())
    outside = cfg.rollout.outside
    for name in ("certificate_file", "key_file", "token_file"):
        if path := getattr(outside, name):
            setattr(outside, name, str(Path(path).expanduser().absolute()))
    if (store := cfg.weight_sync.store) and "://" not in store:
        cfg.weight_sync.store = str(Path(store).expanduser().absolute())
    make_absolute(cfg)


def load_data(cfg: Config, today: datetime | None = None) -> tuple[list[Prompt], list[HeldOut], str]:
    """Loads training prompts, held-out sets, and the fingerprint of the training prompts. today: the date for chat
    templates that use it; None: the current one. Raises ValueError: see `dapo.data.prompts.load_counted`."""
    tokenizer = load_tokenizer(cfg.model)
    prompts, _ = load_train(cfg, tokenizer, today=today, told=_tell)
    held_out = load_held_out(cfg, tokenizer, today=today, told=_tell)
    check_rows([*prompts, *(prompt for one in held_out for prompt in one.prompts)], cfg.model.path)
    for line in notes.of_all(cfg, tokenizer, prompts, held_out):
        warn(line)
    return prompts, held_out, fingerprint(prompts, tokenizer, cfg.data.chat_template_kwargs)


def _tell(key: str, report: DataReport) -> None:
    say(
        f"{key}: {report.rows} rows, {report.duplicates} duplicates, {report.contradictory} contradictory, "
        f"{report.too_long} longer than `data.max_prompt_length`, {report.kept} prompts"
    )


async def evaluate(
    cfg: Config, begun: Callable[[int], None] = lambda answers: None, answered: Callable[[int], None] = lambda n: None
) -> Answered:
    """Answers the held-out prompts with the model at `model.path`, using engines and reward workers but no actors.
    begun: called with the total number of answers; answered: with the number of new ones. Raises as `train` does; wrong
    input is reported before anything starts."""
    task = asyncio.current_task()
    assert task is not None
    make_paths_absolute(cfg)
    preflight(cfg, trains=False)
    tokenizer = load_tokenizer(cfg.model)
    held_out = load_held_out(cfg, tokenizer, told=_tell)
    for line in notes.of_all(cfg, tokenizer, [], held_out):
        warn(line)
    check_rows([prompt for one in held_out for prompt in one.prompts], cfg.model.path)
    cfg.trainer.only = "rollout"
    halve_roles(cfg)
    with Watchdog(cfg.logging.watchdog_s), ray_cluster(cfg):
        Stop(task).install()
        async with build_pools(cfg) as pools:
            evaluation = Evaluation(held_out, pools.rollouts, pools.rewards, cfg, version=0, answered=answered)
            try:
                begun(sum(sum(one.samples) for one in held_out))
                evaluation.hurry()
                return await evaluation.answers()
            finally:
                await evaluation.close()
