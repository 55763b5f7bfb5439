"""Starts a run: `python -m dapo.main_ppo [+experiment=NAME] [key=value ...]`.

    command line ─▶ Hydra ─▶ Config, checked ─▶ output directory, claimed ─▶ dapo.driver.run.train

Everything that needs no worker is done before torch and Ray are loaded: help, `--cfg job` and its checks, wrong keys or
values, a complete run. However a run ends, it prints one message with the reason, and its exit code says what to do.
"""

import asyncio
import gc
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from textwrap import wrap

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dapo.config.checks import doubts, validate
from dapo.config.compose import check_shown, checked_overrides, typed
from dapo.config.names import experiments
from dapo.config.paths import config_dir
from dapo.config.run_name import named
from dapo.config.schema import Config
from dapo.driver.progress import starting
from dapo.ground.console import EXIT_INTERRUPTED, EXIT_RESUMABLE, end, say, warn
from dapo.ground.signals import caught
from dapo.ground.time_limit import TimeLimitReached
from dapo.state.driver_state import owes_evaluation
from dapo.state.run_dir import claim_output_dir

HELP = """\
dapo train [EXPERIMENT] [KEY=VALUE ...]

EXPERIMENT, also as +experiment=NAME:
{experiments}

`dapo config KEY` says what a key means, config/README.md has all; engine arguments of vLLM are
rollout.vllm.NAME.

--cfg job                          print the composed configuration and stop
--config-dir DIR +experiment=OWN   take DIR/experiment/OWN.yaml
--hydra-help                       the other options
dapo plan ...                      memory and time that the same arguments need
dapo doctor ...                    whether machine, model and data are fit for them"""


def main() -> None:
    _catch()
    if {"--help", "-h"} & {*sys.argv[1:]}:
        say(HELP.format(experiments="\n".join(wrap(", ".join(experiments()), 110, break_on_hyphens=False))))
        return
    try:
        sys.argv[1:] = checked_overrides(sys.argv[1:])
    except ValueError as error:
        end(str(error))
    _hydra_main()
    try:
        if folder := check_shown(sys.argv[1:]):
            say(f"# output directory: {folder}")
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
        launch(accepted(typed(named(tree, HydraConfig.get().overrides.task))))
    except KeyboardInterrupt:
        end("interrupted", EXIT_INTERRUPTED)
    except TimeLimitReached as error:
        end(str(error), EXIT_RESUMABLE)
    except asyncio.CancelledError:
        end("stopped by a signal; the same command continues the run", EXIT_RESUMABLE)
    except (ValueError, RuntimeError, OSError) as error:
        end(str(error))


def accepted(cfg: Config) -> Config:
    """Returns `cfg`. Raises ValueError with all that is wrong with its values, and with machine and files too."""
    try:
        validate(cfg)
    except ValueError as error:
        from dapo.driver.preflight import file_problems

        values = str(error).splitlines()
        told = [line.split("`", 2)[:2] for line in values]
        with suppress(Exception):  # values that are wrong may be of no use to the checks of machine and files
            values = [*_machine_problems(cfg), *values]
            values += [line for line in file_problems(cfg) if line.split("`", 2)[:2] not in told]
        raise ValueError("\n".join(values)) from None
    return cfg


def launch(cfg: Config) -> None:
    """Claims the output directory and trains the remaining steps. `trainer.max_hours` counts from here, because hashing
    the newest checkpoint takes minutes."""
    began = time.monotonic()
    with starting(cfg, "the newest checkpoint to be found and hashed"):
        claimed = claim_output_dir(cfg.trainer.output_dir, cfg.checkpoint.resume, asdict(cfg))
    with claimed as run_dir:
        say(f"output directory: {cfg.trainer.output_dir}")
        for notice in run_dir.notices:
            say(notice)
        store = run_dir.store
        last = store.completed(cfg.trainer.total_steps)
        if last is not None and not owes_evaluation(last, run_dir.path):
            run_dir.begin()
            say(f"complete: {last}; raise `trainer.total_steps` or give another `trainer.output_dir`")
            return
        with starting(cfg, "settings, files and functions to be checked"):
            _check(cfg)
        with starting(cfg, "torch and Ray to be imported"):
            from dapo.driver.run import COLLECT_AT, train_until_signal
            from dapo.results.publish import published
            from dapo.results.summary import concluded

        with published(run_dir, cfg, _experiment()), concluded(run_dir.path, run_dir.check):
            gc.set_threshold(COLLECT_AT)
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

    for line in doubts(cfg):
        warn(line)
    if problems := [*_machine_problems(cfg), *early_problems(cfg, warn, say)]:
        raise ValueError("\n".join(problems))


def _machine_problems(cfg: Config) -> list[str]:
    from dapo.tools.doctor.checks import check_machine

    try:
        if cfg.trainer.preflight:
            check_machine(cfg, warn)
    except ValueError as error:
        return str(error).splitlines()
    return []


if __name__ == "__main__":
    main()
