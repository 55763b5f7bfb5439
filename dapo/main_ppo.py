"""Starts a run: `python -m dapo.main_ppo [+experiment=NAME] [key=value ...]`.

    command line ─▶ Hydra ─▶ Config, checked ─▶ output directory, claimed ─▶ dapo.driver.run.train

Everything that needs no worker is done before torch and Ray are loaded: help, `--cfg job` and its checks, wrong keys or
values, a complete run. However a run ends, it prints one message with the reason, and its exit code says what to do.
"""

import asyncio
import signal
import sys
import time
from dataclasses import asdict

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dapo.config.checks import doubts
from dapo.config.compose import check_shown, checked_overrides, to_config
from dapo.config.paths import config_dir
from dapo.config.schema import Config
from dapo.ground.console import EXIT_INTERRUPTED, EXIT_RESUMABLE, end, say, warn
from dapo.ground.signals import caught
from dapo.ground.time_limit import TimeLimitReached
from dapo.ground.watchdog import Watchdog, waiting
from dapo.state.driver_state import owes_evaluation
from dapo.state.run_dir import claim_output_dir


def main() -> None:
    _catch()
    try:
        sys.argv[1:] = checked_overrides(sys.argv[1:])
    except ValueError as error:
        end(str(error))
    _hydra_main()
    try:
        check_shown(sys.argv[1:])
    except ValueError as error:
        warn(f"a run would refuse it: {error}")


def _catch() -> None:
    """Installs signal handlers for the time before and after the run. Python handles Ctrl-C, without a traceback
    (`dapo.ground.uncaught`)."""
    for number in caught():
        if number != signal.SIGINT:
            signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    end("stopped by a signal outside of the training; the same command goes on with what is left to do", EXIT_RESUMABLE)


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="dapo")
def _hydra_main(tree: DictConfig) -> None:
    try:
        launch(to_config(tree))
    except KeyboardInterrupt:
        end("interrupted", EXIT_INTERRUPTED)
    except TimeLimitReached as error:
        end(str(error), EXIT_RESUMABLE)
    except asyncio.CancelledError:
        end("stopped by a signal; the same command continues the run", EXIT_RESUMABLE)
    except (ValueError, RuntimeError, OSError) as error:
        end(str(error))


def launch(cfg: Config) -> None:
    """Claims the output directory and trains the remaining steps. `trainer.max_hours` counts from here, because hashing
    the newest checkpoint takes minutes."""
    began = time.monotonic()
    with Watchdog(cfg.logging.watchdog_s), waiting("the newest checkpoint to be found and hashed"):
        claimed = claim_output_dir(cfg.trainer.output_dir, cfg.checkpoint.resume, asdict(cfg))
    with claimed as run_dir:
        for notice in run_dir.notices:
            say(notice)
        store = run_dir.store
        last = store.completed(cfg.trainer.total_steps)
        if last is not None and not owes_evaluation(last, run_dir.path):
            run_dir.begin()
            say(f"complete: {last}; raise `trainer.total_steps` or give another `trainer.output_dir`")
            return
        _check(cfg)
        from dapo.driver.run import train_until_signal  # loads torch and Ray, which takes seconds
        from dapo.results.publish import published
        from dapo.results.summary import concluded

        with published(run_dir, cfg, _experiment()), concluded(run_dir.path, run_dir.check):
            try:
                asyncio.run(train_until_signal(cfg, run_dir, store, began))
            finally:
                _catch()


def _experiment() -> str:
    """Returns the experiment's name; "" without one, or if this is no command."""
    return str(HydraConfig.get().runtime.choices.get("experiment", "")) if HydraConfig.initialized() else ""


def _check(cfg: Config) -> None:
    """Raises ValueError with all problems that can be found without torch, which takes seconds to load. The machine is
    checked first: its failures are not caused by the files."""
    from dapo.driver.preflight import early_problems
    from dapo.tools.doctor.checks import check_machine

    for line in doubts(cfg):
        warn(line)
    problems = []
    try:
        if cfg.trainer.preflight:
            check_machine(cfg, warn)
    except ValueError as error:
        problems.append(str(error))
    if problems := [*problems, *early_problems(cfg, warn)]:
        raise ValueError("\n".join(problems))


if __name__ == "__main__":
    main()
