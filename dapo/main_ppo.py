"""Entry point: `python -m dapo.main_ppo [+experiment=NAME] [key=value ...]`.

    command line ─▶ Hydra ─▶ Config, validated ─▶ data ─▶ pools (Ray) ─▶ Trainer.run ─▶ everything stopped

Everything that can be wrong with the input is found before the first engine starts. However a run ends (last step,
Ctrl-C, a failure anywhere), what was trained is saved, all processes are stopped, and the reason is one message.
"""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dapo.checkpoint import CheckpointStore, step_of
from dapo.config import Config
from dapo.data import fingerprint, load_prompts
from dapo.metrics import MetricsLogger
from dapo.overrides import checked_overrides, config_dir
from dapo.paths import resolve_path
from dapo.pools import Pools
from dapo.run_dir import claim_output_dir
from dapo.trainer import Trainer
from dapo.types import Prompt
from dapo.validate import validate

STOP_GRACE_S = 3.0
EXIT_INTERRUPTED = 130  # the shell's code for Ctrl-C
EXIT_RESUMABLE = 85  # SIGTERM or SIGUSR1 (Slurm, spot machines): saved, to be continued

ConfigStore.instance().store(name="dapo_schema", node=Config)


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


def end(message: str, code: int) -> NoReturn:
    """Leaves the program with one message."""
    print(f"dapo: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def to_config(tree: DictConfig) -> Config:
    """The typed, validated configuration.

    Raises:
        ValueError: a value is missing, or the checks of `dapo.validate` found problems.
    """
    missing = sorted(OmegaConf.missing_keys(tree))
    if missing:
        raise ValueError(
            f"no value for {', '.join(f'`{key}`' for key in missing)}; give one, or take a +experiment=NAME"
        )
    try:
        cfg: Any = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise ValueError(f"configuration: {error}") from error
    validate(cfg)
    return cfg


def make_paths_absolute(cfg: Config) -> None:
    """Remote workers run in a directory of Ray's, where a relative path means nothing."""
    cfg.model.path = resolve_path(cfg.model.path)
    for spec in cfg.reward.functions:
        if spec.path.endswith(".py"):
            spec.path = str(Path(spec.path).expanduser().absolute())


async def train(cfg: Config) -> None:
    """One run: from checked input to stopped processes."""
    began = time.monotonic()
    run_dir = claim_output_dir(cfg.trainer.output_dir, cfg.checkpoint.resume, asdict(cfg))
    make_paths_absolute(cfg)
    store = CheckpointStore(run_dir.checkpoints, keep=cfg.checkpoint.keep)
    try:
        newest = store.latest()
        if newest is not None and step_of(newest) >= cfg.trainer.total_steps:
            say(f"complete: {newest}; raise `trainer.total_steps` or give another `trainer.output_dir`")
            return
        loading = asyncio.create_task(asyncio.to_thread(load_data, cfg))  # both take seconds; Ray's are spent waiting
        with ray_cluster(cfg):
            prompts, held_out = await loading
            run_dir.check_data(fingerprint(prompts))
            async with build_pools(cfg) as pools:
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
            prompts, report = load_prompts(files, tokenizer, max_prompt_length=cfg.data.max_prompt_length, key=key)
            say(
                f"{key}: {report.rows} rows, {report.duplicates} duplicates, {report.too_long} longer than "
                f"`data.max_prompt_length`, {report.kept} prompts"
            )
        loaded.append(prompts)
    return loaded[0], loaded[1]


@contextmanager
def ray_cluster(cfg: Config) -> Iterator[None]:
    """Joins or starts Ray, and leaves or ends it."""
    import ray

    from workers.cluster import connect

    connect(cfg.trainer.ray_address, worker_logs=cfg.logging.worker_logs)
    try:
        cancel_on_signals()
        yield
    finally:
        ray.shutdown()


@asynccontextmanager
async def build_pools(cfg: Config) -> AsyncIterator[Pools]:
    """The one place that composes: starts all workers side by side, and stops them at the end."""
    from workers.actor import ActorPool
    from workers.cluster import Placement, engine_args, resolve_device
    from workers.reward import RewardPool
    from workers.rollout import RolloutPool
    from workers.weight_sync import WeightSync

    device = resolve_device(cfg.trainer.device)
    placement = Placement(cfg, device)
    rollouts = RolloutPool(
        placement.rollout(), start_timeout_s=cfg.rollout.start_timeout_s, timeout_s=cfg.rollout.timeout_s
    )
    actors = ActorPool(cfg, device, placement.actors())
    rewards = RewardPool(
        placement.rewards(),
        num_workers=cfg.reward.num_workers,
        functions=cfg.reward.functions,
        overlong=cfg.reward.overlong_buffer,
        max_response_length=cfg.data.max_response_length,
        timeout_s=cfg.reward.timeout_s,
    )
    try:
        await asyncio.gather(
            rollouts.start(cfg.model.path, engine_args(cfg, device)),
            actors.start(),
            rewards.start(cfg.rollout.start_timeout_s),
        )
        sync = WeightSync(actors, rollouts, cfg.weight_sync)
        yield Pools(rollouts=rollouts, rewards=rewards, actors=actors, sync_weights=sync)
    finally:
        actors.close()
        rewards.stop()
        await rollouts.stop(STOP_GRACE_S)


def cancel_on_signals() -> None:
    """SIGTERM and SIGUSR1 cancel the run, as Ctrl-C does; after `ray.init`, which installs a handler of its own."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGUSR1):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


if __name__ == "__main__":
    main()
