"""Entry point: `python -m dapo.main_ppo [+experiment=NAME] [key=value ...]`.

    command line ─▶ Hydra ─▶ Config, validated ─▶ data ─▶ pools (Ray) ─▶ Trainer.run ─▶ everything stopped

Everything that can be wrong with the input is found before the first engine starts. However a run ends (last step,
Ctrl-C, a failure anywhere), what was trained is saved, all processes are stopped, and the reason is one message.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from omegaconf import DictConfig

from dapo.config.compose import checked_overrides, to_config
from dapo.config.paths import config_dir, resolve_path
from dapo.config.schema import Config
from dapo.data.prompts import fingerprint, load_prompts
from dapo.derived import resolve_transport
from dapo.pools import Pools
from dapo.report.log import MetricsLogger
from dapo.state.checkpoint import CheckpointStore, step_of
from dapo.state.run_dir import claim_output_dir
from dapo.trainer import Trainer
from dapo.types import Prompt

if TYPE_CHECKING:
    from workers.cluster import Placement
    from workers.reward_model import RewardModelPool
    from workers.rollout import RolloutPool

STOP_GRACE_S = 3.0
EXIT_INTERRUPTED = 130  # the shell's code for Ctrl-C
EXIT_RESUMABLE = 85  # SIGTERM or SIGUSR1 (Slurm, spot machines): saved, to be continued


def main() -> None:
    """Checks the command line, then lets Hydra compose and run."""
    try:
        sys.argv[1:] = checked_overrides(sys.argv[1:])
    except ValueError as error:
        end(str(error), 1)
    _hydra_main()


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="dapo")
def _hydra_main(tree: DictConfig) -> None:
    try:
        asyncio.run(train(to_config(tree)))
    except KeyboardInterrupt:
        end("interrupted", EXIT_INTERRUPTED)
    except asyncio.CancelledError:
        end("stopped by a signal; the same command continues the run", EXIT_RESUMABLE)
    except (ValueError, RuntimeError, OSError) as error:
        end(str(error), 1)


def say(line: str) -> None:
    """One line for a person, at once also where the output is a file."""
    print(line, flush=True)


def warn(message: str) -> None:
    """One line about what went wrong and did not stop the run."""
    print(message, file=sys.stderr, flush=True)


def end(message: str, code: int) -> NoReturn:
    """Leaves the program with one message."""
    print(f"dapo: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def make_paths_absolute(cfg: Config) -> None:
    """Remote workers run in a directory of Ray's, where a relative path means nothing."""
    cfg.model.path = resolve_path(cfg.model.path)
    for spec in cfg.reward.functions:
        if spec.path.endswith(".py"):
            spec.path = str(Path(spec.path).expanduser().absolute())


def completed(cfg: Config, store: CheckpointStore) -> Path | None:
    """The checkpoint of the run's last step, or None while there is something left to train."""
    newest = store.latest()
    return newest if newest is not None and step_of(newest) >= cfg.trainer.total_steps else None


async def train(cfg: Config, rollouts: "RolloutPool | None" = None) -> None:
    """One run: from checked input to stopped processes.

    rollouts: engines that outlive the run (`build_rollouts`, inside `ray_cluster`); None: Ray and engines of its own.
    """
    began = time.monotonic()
    run_dir = claim_output_dir(cfg.trainer.output_dir, cfg.checkpoint.resume, asdict(cfg))
    make_paths_absolute(cfg)
    store = CheckpointStore(run_dir.checkpoints, keep=cfg.checkpoint.keep)
    try:
        if (last := completed(cfg, store)) is not None:
            say(f"complete: {last}; raise `trainer.total_steps` or give another `trainer.output_dir`")
            return
        loading = asyncio.create_task(asyncio.to_thread(load_data, cfg))  # both take seconds; Ray's are spent waiting
        with ray_cluster(cfg) if rollouts is None else nullcontext():
            prompts, held_out = await loading
            run_dir.check_data(fingerprint(prompts))
            async with build_pools(cfg, rollouts) as pools:
                say(f"ready after {time.monotonic() - began:.0f} s")
                logger = MetricsLogger(run_dir.path, tensorboard=cfg.logging.tensorboard)
                await run_steps(Trainer(cfg, pools, prompts, held_out, store, logger, say=say), logger)
    finally:
        run_dir.release()


async def run_steps(trainer: Trainer, logger: MetricsLogger) -> None:
    """Trains; however that ends, what was trained is saved."""
    try:
        await trainer.run()
    except BaseException:
        if trainer.unsaved:
            await save_what_was_trained(trainer)
        raise
    finally:
        logger.close()


async def save_what_was_trained(trainer: Trainer) -> None:
    """The last act of a failed or interrupted run. A failure here is told and does not hide the first one."""
    try:
        await trainer.save()
        say(f"saved step {trainer.version}")
    except Exception as error:
        print(f"step {trainer.version} could not be saved: {error}", file=sys.stderr, flush=True)


def load_data(cfg: Config) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts. Raises ValueError: see `dapo.data.load_prompts`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    loaded = []
    for key, files in (("data.train_files", cfg.data.train_files), ("data.val_files", cfg.data.val_files)):
        prompts: list[Prompt] = []
        if files:
            prompts, report = load_prompts(
                files,
                tokenizer,
                max_prompt_length=cfg.data.max_prompt_length,
                max_contradictory=cfg.data.max_contradictory,
                key=key,
            )
            say(
                f"{key}: {report.rows} rows, {report.duplicates} duplicates, {report.contradictory} contradictory, "
                f"{report.too_long} longer than `data.max_prompt_length`, {report.kept} prompts"
            )
        loaded.append(prompts)
    return loaded[0], loaded[1]


@contextmanager
def ray_cluster(cfg: Config) -> Iterator[None]:
    """Joins or starts Ray, and leaves or ends it."""
    import ray

    from workers.cluster import connect

    # The waits on Ray that a failure or signal cancels would else be told one by one at exit, each with a traceback.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    connect(cfg.trainer.ray_address, worker_logs=cfg.logging.worker_logs)
    try:
        cancel_on_signals()
        yield
    finally:
        ray.shutdown()


@asynccontextmanager
async def build_pools(cfg: Config, rollouts: "RolloutPool | None" = None) -> AsyncIterator[Pools]:
    """The one place that composes: starts all workers side by side, and stops them at the end.

    rollouts: engines that are already up and stay up, from `build_rollouts`; the first weight sync gives them the
    actors' weights, whatever they served before.
    """
    from workers.actor import ActorPool
    from workers.cluster import Placement, engine_args, resolve_device
    from workers.reward import RewardPool
    from workers.weight_sync import WeightSync

    device = resolve_device(cfg.trainer.device)
    placement = Placement(cfg, device)
    engines = _create_rollouts(cfg, placement) if rollouts is None else rollouts
    actors = ActorPool(cfg, device, placement.actors())
    rewards = RewardPool(
        placement.rewards(),
        cfg.reward,
        max_response_length=cfg.data.max_response_length,
        model=_create_reward_model(cfg, placement, device) if cfg.reward.model.path else None,
        warn=warn,
    )
    try:
        starts: list[Awaitable[Any]] = [rewards.start(cfg.rollout.start_timeout_s), actors.start()]
        if rollouts is None:
            starts.append(engines.start(cfg.model.path, engine_args(cfg, device)))
        if cfg.trainer.colocate:
            await starts.pop()  # an engine measures what memory is free; actors that load meanwhile would mislead it
        say((await asyncio.gather(*starts))[0])
        sync = WeightSync(actors, engines, cfg.weight_sync, resolve_transport(cfg, device))
        yield Pools(rollouts=engines, rewards=rewards, actors=actors, sync_weights=sync)
    finally:
        actors.close()
        rewards.stop()
        if rollouts is None:
            await engines.stop(STOP_GRACE_S)


@asynccontextmanager
async def build_rollouts(cfg: Config) -> AsyncIterator["RolloutPool"]:
    """The engines alone, for several runs one after the other (`train(cfg, rollouts)`); stopped at the end.

    Raises:
        ValueError: on GPUs, which one placement group per run hands to engines and actors together.
    """
    from workers.cluster import Placement, engine_args, resolve_device

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
    """What `build_rollouts` starts engines with, by name: runs that share engines must agree on it.

    vLLM's seed is not among it: every response is a request with a seed of its own.
    """
    from workers.cluster import engine_args

    keys = ("num_engines", "cpu_threads", "start_timeout_s", "timeout_s")
    rollout = {f"rollout.{key}": value for key, value in asdict(cfg.rollout).items() if key in keys}
    arguments = {f"engine argument {name}": value for name, value in engine_args(cfg, "cpu").items() if name != "seed"}
    return {"model.path": resolve_path(cfg.model.path), **rollout, **arguments}


def _create_rollouts(cfg: Config, placement: "Placement") -> "RolloutPool":
    from workers.rollout import RolloutPool

    return RolloutPool(
        placement.rollout(), start_timeout_s=cfg.rollout.start_timeout_s, timeout_s=cfg.rollout.timeout_s
    )


def _create_reward_model(cfg: Config, placement: "Placement", device: str) -> "RewardModelPool":
    from workers.cluster import reward_model_device
    from workers.reward_model import RewardModelPool

    return RewardModelPool(cfg.reward.model, placement.reward_model(), device=reward_model_device(cfg, device))


def cancel_on_signals() -> None:
    """SIGTERM and SIGUSR1 cancel the run, as Ctrl-C does; after `ray.init`, which installs a handler of its own."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGUSR1):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


if __name__ == "__main__":
    main()
