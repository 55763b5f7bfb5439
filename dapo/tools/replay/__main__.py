"""Replays one step of a run: `python -m dapo.replay RUN --step N [--out DIR] [key=value ...]`.

    RUN ─▶ newest checkpoint before N, batches up to N ─▶ actors alone ─▶ metrics and weights beside those of RUN

On CPUs the result is bitwise equal. Keys change the training, for example to another clip bound or a lower learning
rate. Start it in the directory where the run was started: paths in its configuration may be relative. The run itself is
only read. Exit code 1: the results differ although no key was changed.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dapo.ground.console import EXIT_INTERRUPTED, end, say
from dapo.ground.watchdog import Watchdog
from dapo.state.run_dir import claim_output_dir
from dapo.tools.replay.again import Replay, prepare
from dapo.tools.replay.outcome import Outcome, outcome, words


def parser() -> argparse.ArgumentParser:
    program = argparse.ArgumentParser(prog="dapo replay", description="Takes one step of a run again.")
    program.add_argument("run", type=Path, metavar="RUN", help="output directory of a run")
    program.add_argument("--step", type=int, required=True, metavar="N", help="the step, as in metrics.jsonl")
    program.add_argument("--out", type=Path, metavar="DIR", help="for the new run; default: RUN/replays/step_N")
    program.add_argument("overrides", nargs="*", metavar="key=value", help="what is to be another than in the run")
    return program


def replay(given: Replay) -> Outcome:
    from dapo.driver.run import train_until_signal  # loads torch and Ray, which takes seconds

    cfg, began = given.cfg, time.monotonic()
    with (
        Watchdog(cfg.logging.watchdog_s),
        claim_output_dir(cfg.trainer.output_dir, cfg.checkpoint.resume, asdict(cfg)) as run_dir,
    ):
        asyncio.run(train_until_signal(cfg, run_dir, run_dir.store, began, until=given.step))
    return outcome(given.run, given.folder, given.step)


def main(arguments: Sequence[str] | None = None) -> None:
    asked = parser().parse_intermixed_args(arguments)
    try:
        given = prepare(asked.run, asked.step, asked.out, asked.overrides)
        steps = "" if given.first == given.step else f", by way of steps {given.first} to {given.step - 1}"
        say(f"step {given.step} from {given.origin or given.cfg.model.path}{steps}")
        found = replay(given)
    except (KeyboardInterrupt, asyncio.CancelledError):
        end("interrupted; nothing was compared", EXIT_INTERRUPTED)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"dapo.replay: {error}")
    say(words(found, given.step))
    if not found.same and not given.changed:
        sys.exit(1)


if __name__ == "__main__":
    main()
