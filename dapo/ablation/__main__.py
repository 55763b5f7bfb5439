"""Climbs the ablation ladder of the paper's Table 1 (arXiv 2503.14476, section 4.2) on the tiny task.

    python -m dapo.ablation --seeds 0 1 2 --out outputs/ablation [--rungs grpo ...] [--report] [key=value ...]
    python -m dapo.ablation --smoke

In: the experiments `ablation/RUNG`, each one change away from the one before. Out: a run directory OUT/RUNG-seedS each,
and the table and picture of `dapo.ablation.report`. One Ray and one engine serve all runs. The same command continues
an interrupted ladder.
"""

import argparse
import asyncio
import difflib
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dapo.ablation.report import write_report
from dapo.ablation.results import RUNGS, run_folder
from dapo.config.compose import compose
from dapo.config.schema import Config
from dapo.driver.preflight import preflight
from dapo.faults.signals import Stop
from dapo.fleet import build_rollouts, engine_needs, ray_cluster
from dapo.report.console import EXIT_INTERRUPTED, EXIT_RESUMABLE, end, say
from dapo.run import cancelled_when_lost, train
from dapo.state.changes import changes, is_accepted
from dapo.state.checkpoint import CheckpointStore
from dapo.state.inputs import read_config
from dapo.state.run_dir import CHECKPOINTS, CONFIG, claim_output_dir, holds_steps

OWN_KEYS = ("experiment", "trainer.seed", "trainer.output_dir")  # what the ladder sets itself
# What a continued or finished run may have had otherwise: nothing of it moves a number of the report.
FREE = ("checkpoint", "logging", "trainer.total_steps", "trainer.output_dir", "trainer.ray_address")
OUT, SMOKE_OUT = Path("outputs/ablation"), Path("outputs/ablation-smoke")
SMOKE = (  # every rung as it is, but for its size
    *("trainer.total_steps=2", "data.train_batch_size=4", "data.gen_batch_size=12", "actor.ppo_mini_batch_size=2"),
    *("rollout.n=4", "eval.n=1", "eval.every=2", "eval.before_train=false", "actor.num_workers=1"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderRun:
    """Describes one rung with one seed. Made by `ladder_runs`, consumed by `run_ladder`. number: its place in the
    ladder, from 1."""

    number: int
    rung: str
    seed: int
    cfg: Config

    def store(self) -> CheckpointStore:
        """Opens the run's checkpoints for reading; the run itself writes them."""
        return CheckpointStore(Path(self.cfg.trainer.output_dir) / CHECKPOINTS, keep=self.cfg.checkpoint.keep)


def chosen_rungs(names: Sequence[str]) -> list[str]:
    """Returns the named rungs in the order of the ladder, all rungs for no name. Raises ValueError for an unknown
    one.
    """
    for name in names:
        if name not in RUNGS:
            near = difflib.get_close_matches(name, RUNGS, n=1, cutoff=0.4)
            hint = f"did you mean `{near[0]}`? " if near else ""
            raise ValueError(f"unknown rung `{name}` in `--rungs`; {hint}There are: {', '.join(RUNGS)}")
    return [rung for rung in RUNGS if rung in (names or RUNGS)]


def compose_run(rung: str, seed: int, out: Path, overrides: Sequence[str]) -> Config:
    """Returns the validated configuration of one run.

    Raises:
        ValueError: an override is unknown, wrong, or one of those that the ladder sets itself.
    """
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key in OWN_KEYS:
            raise ValueError(f"`{key}` is the ladder's own; leave out `{override}` and use --rungs, --seeds and --out")
    try:
        cfg = compose([*overrides, f"trainer.seed={seed}"], experiment=f"ablation/{rung}")
    except ValueError as error:
        raise ValueError(f"configuration of rung `{rung}`: {error}") from error
    cfg.trainer.output_dir = str(run_folder(out, rung, seed))
    return cfg


def ladder_runs(rungs: Sequence[str], seeds: Sequence[int], out: Path, overrides: Sequence[str]) -> list[LadderRun]:
    """Lists all runs, seed by seed, so that an interrupted ladder has whole ladders of the first seeds.

    Raises:
        ValueError: see `compose_run`, `check_engine`, `check_recorded`.
    """
    pairs = [(seed, rung) for seed in seeds for rung in rungs]
    runs = [
        LadderRun(number=number, rung=rung, seed=seed, cfg=compose_run(rung, seed, out, overrides))
        for number, (seed, rung) in enumerate(pairs, 1)
    ]
    check_engine(runs)
    for run in runs:
        check_recorded(run)
        preflight(run.cfg)
    return runs


def check_engine(runs: Sequence[LadderRun]) -> None:
    """Raises ValueError where a run needs other engines than the first, or GPUs."""
    first = runs[0]
    wanted = engine_needs(first.cfg)
    for run in runs:
        if run.cfg.trainer.device == "cuda":
            raise ValueError(
                f"`trainer.device` of rung `{run.rung}` is cuda, and the ladder shares its engines between runs, which "
                "works on cpu; set trainer.device=cpu, or run each rung with dapo.main_ppo"
            )
        needs = engine_needs(run.cfg)
        for name in sorted(wanted.keys() | needs.keys()):
            if wanted.get(name) != needs.get(name):
                raise ValueError(
                    f"all rungs share one set of engines, but `{name}` is {wanted.get(name)!r} in rung `{first.rung}` "
                    f"and {needs.get(name)!r} in rung `{run.rung}`; give one value for all, or run them with --rungs "
                    "in ladders of their own"
                )


def check_recorded(run: LadderRun) -> None:
    """Raises ValueError where the run's directory holds steps of other settings: its result would be mixed in."""
    folder = Path(run.cfg.trainer.output_dir)
    if not (folder.is_dir() and holds_steps(folder) and (folder / CONFIG).is_file()):
        return
    recorded = read_config(folder / CONFIG, str(folder))
    differences = [str(one) for one in changes(recorded, asdict(run.cfg)) if not is_accepted(one.key, FREE)]
    if differences:
        raise ValueError(f"{folder} holds a run of other settings: {', '.join(differences)}; give another `--out`")


async def run_ladder(runs: Sequence[LadderRun]) -> None:
    """Trains what is not finished yet; without anything to train, neither Ray nor an engine starts.

    Raises KeyboardInterrupt after Ctrl-C and CancelledError after another signal, once the run under way has saved, and
    LeaseLost when another run has taken its directory over.
    """
    pending = [run for run in runs if run.store().completed(run.cfg.trainer.total_steps) is None]
    if len(pending) < len(runs):
        say(f"{len(runs) - len(pending)} of {len(runs)} runs are finished already")
    if not pending:
        return
    rungs = list(dict.fromkeys(run.rung for run in runs))
    shared, task = pending[0].cfg, asyncio.current_task()
    assert task is not None
    stop = Stop(task)
    stop.install()
    try:
        with ray_cluster(shared):
            stop.install()  # once more: Ray has put a handler of its own in place
            async with build_rollouts(shared) as rollouts:
                for run in pending:
                    place = f"rung {rungs.index(run.rung) + 1}/{len(rungs)} {run.rung}"
                    say(f"{place} · seed {run.seed} · run {run.number}/{len(runs)}")
                    cfg = run.cfg
                    with (
                        claim_output_dir(cfg.trainer.output_dir, cfg.checkpoint.resume, asdict(cfg)) as run_dir,
                        cancelled_when_lost(run_dir, task),
                    ):
                        await train(cfg, run_dir, run_dir.store, rollouts, stop)
    except asyncio.CancelledError:
        if stop.first == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, and the overrides among the arguments: those with an equals sign that are no option."""
    parser = argparse.ArgumentParser(
        prog="python -m dapo.ablation",
        usage="%(prog)s [--seeds S ...] [--rungs RUNG ...] [--out DIR] [--report] [--smoke] [key=value ...]",
        description="Runs the ablation ladder on the tiny task and writes tables and a picture.",
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="seeds, one whole ladder each (default: 0 1 2)")
    parser.add_argument("--rungs", nargs="+", default=[], help=f"of {', '.join(RUNGS)} (default: all)")
    parser.add_argument("--out", type=Path, help=f"folder of all runs (default: {OUT}, or {SMOKE_OUT} with --smoke)")
    parser.add_argument("--report", action="store_true", help="only tables and picture, from the runs that are there")
    parser.add_argument("--smoke", action="store_true", help="two small steps of every rung with seed 0: does it run?")
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("--")]
    given = parser.parse_args([argument for argument in arguments if argument not in overrides])
    given.seeds = given.seeds or ([0] if given.smoke else [0, 1, 2])
    given.out = given.out or (SMOKE_OUT if given.smoke else OUT)
    return given, [*SMOKE, *overrides] if given.smoke else overrides


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and ends as `dapo.main_ppo` does."""
    given, overrides = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        rungs, seeds = chosen_rungs(given.rungs), list(dict.fromkeys(given.seeds))
        if not given.report:
            asyncio.run(run_ladder(ladder_runs(rungs, seeds, given.out, overrides)))
        say(write_report(given.out, rungs, seeds))
    except KeyboardInterrupt:
        end("interrupted; the same command continues the ladder", EXIT_INTERRUPTED)
    except asyncio.CancelledError:
        end("stopped by a signal; the same command continues the ladder", EXIT_RESUMABLE)
    except (ValueError, RuntimeError, OSError) as error:
        end(str(error), 1)


if __name__ == "__main__":
    main()
