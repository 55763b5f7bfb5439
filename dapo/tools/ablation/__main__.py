"""Climbs the ablation ladder of the paper's Table 1 (arXiv 2503.14476, section 4.2) on the tiny task.

    python -m dapo.ablation --seeds 0 1 2 --out outputs/ablation [--rungs grpo ...] [--report] [key=value ...]
    python -m dapo.ablation --smoke

Each rung is the experiment `ablation/RUNG`, one change away from the one before; each run is `dapo.main_ppo` in a
process of its own and writes OUT/RUNG-seedS. Out: OUT/ablation.md and OUT/ablation.png. The same command continues an
interrupted ladder.
"""

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dapo.ground.console import end, say
from dapo.ground.durable import write_text
from dapo.ground.table import table
from dapo.results.figures import Results, results
from dapo.results.plot import draw
from dapo.results.runs import Run, read_run


@dataclass(frozen=True, slots=True)
class Rung:
    """Describes a row of the table. against: the rung that it is compared with. paper: accuracy in per cent in the
    paper's Table 1 (AIME 2024, avg@32)."""

    label: str
    against: str = ""
    paper: int | None = None


# In order: the paper's ladder, and beside it the other filter that verl's recipe for DAPO compares.
RUNGS = {
    "grpo": Rung("naive GRPO", "", 30),
    "overlong_filtering": Rung("+ overlong filtering", "grpo", 36),
    "clip_higher": Rung("+ clip-higher", "overlong_filtering", 38),
    "soft_overlong": Rung("+ soft overlong punishment", "clip_higher", 41),
    "token_mean": Rung("+ token-level loss", "soft_overlong", 42),
    "dynamic_sampling": Rung("+ dynamic sampling (DAPO)", "token_mean", 50),
    "filter_by_reward": Rung("filter on shaped reward instead", "dynamic_sampling"),
}
COLUMNS = ("rung", "held-out accuracy", "difference", "to", "tokens (M)", "seconds", "paper (AIME 2024, %)")
# Student's t at 0.975 for 1 to 10 degrees of freedom; beyond, the last one is kept.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
OUT, SMOKE_OUT = Path("outputs/ablation"), Path("outputs/ablation-smoke")
SMOKE = (  # every rung as it is, but for its size
    *("trainer.total_steps=2", "data.train_batch_size=4", "data.gen_batch_size=12", "actor.ppo_mini_batch_size=2"),
    *("rollout.n=4", "eval.n=1", "eval.every=2", "eval.before_train=false", "actor.num_workers=1"),
)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, and the overrides among the arguments: those with an equals sign that are no option."""
    parser = argparse.ArgumentParser(
        prog="dapo ablation",
        usage="%(prog)s [--seeds S ...] [--rungs RUNG ...] [--out DIR] [--report] [--smoke] [key=value ...]",
        description="Runs the ablation ladder on the tiny task and writes a table and a picture.",
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="seeds, one whole ladder each (default: 0 1 2)")
    parser.add_argument("--rungs", nargs="+", choices=RUNGS, default=list(RUNGS), metavar="RUNG", help=", ".join(RUNGS))
    parser.add_argument("--out", type=Path, help=f"folder of all runs (default: {OUT}, or {SMOKE_OUT} with --smoke)")
    parser.add_argument("--report", action="store_true", help="only table and picture, from the runs that are there")
    parser.add_argument("--smoke", action="store_true", help="two small steps of every rung with seed 0: does it run?")
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("--")]
    given = parser.parse_args([argument for argument in arguments if argument not in overrides])
    given.seeds = given.seeds or ([0] if given.smoke else [0, 1, 2])
    given.out = given.out or (SMOKE_OUT if given.smoke else OUT)
    return given, [*SMOKE, *overrides] if given.smoke else overrides


def command(rung: str, seed: int, out: Path, overrides: Sequence[str]) -> list[str]:
    """Returns the command of one run."""
    own = [
        f"+experiment=ablation/{rung}",
        *overrides,
        f"trainer.seed={seed}",
        f"trainer.output_dir={out}/{rung}-seed{seed}",
    ]
    return [sys.executable, "-m", "dapo.main_ppo", *own]


def read_ladder(out: Path, rungs: Sequence[str], seeds: Sequence[int]) -> tuple[dict[str, dict[int, Run]], list[str]]:
    """Returns the runs by rung and seed, of the seeds whose rungs are all complete, and why the others are left out.
    Raises ValueError where no seed is whole."""
    runs: dict[str, dict[int, Run]] = {rung: {} for rung in rungs}
    unfinished = []
    for seed in seeds:
        try:
            ladder = {rung: _complete(read_run(out / f"{rung}-seed{seed}")) for rung in rungs}
        except ValueError as error:
            unfinished.append(str(error))
            continue
        for rung, run in ladder.items():
            runs[rung][seed] = run
    if len(unfinished) == len(seeds):
        raise ValueError(f"no seed has all of its rungs: {'; '.join(unfinished)}; run the ladder to its end")
    return runs, unfinished


def _complete(run: Run) -> Run:
    found = results(run)
    if found.last_step != found.total_steps or not found.held_out or found.held_out[0].last.step != found.total_steps:
        raise ValueError(f"{run.name} has {found.last_step} of {found.total_steps} steps, or lacks the last evaluation")
    return run


def report(ladder: dict[str, dict[int, Run]], unfinished: Sequence[str]) -> str:
    """Returns the table: means over seeds with 95 % Student-t intervals, differences paired by seed."""
    found = {rung: {seed: results(run) for seed, run in runs.items()} for rung, runs in ladder.items()}
    rungs = list(found)
    rows = []
    for rung, runs in found.items():
        against = RUNGS[rung].against
        gains = [_final(run) - _final(found[against][seed]) for seed, run in runs.items()] if against in found else []
        rows.append(
            [
                f"{rungs.index(rung) + 1} {RUNGS[rung].label}",
                interval([_final(run) for run in runs.values()], ".3f"),
                interval(gains, "+.3f") if gains else "",
                f"{rungs.index(against) + 1}" if gains else "",
                f"{statistics.fmean(run.tokens_generated or math.nan for run in runs.values()) / 1e6:.2f}",
                f"{statistics.fmean(run.seconds['steps'] for run in runs.values()):.0f}",
                str(RUNGS[rung].paper or ""),
            ]
        )
    seeds = ", ".join(map(str, next(iter(found.values()))))
    lines = [
        table(COLUMNS, rows),
        "",
        f"Means over seeds {seeds} ± half of the 95 % Student-t interval, paired by seed.",
    ]
    return "\n".join([*lines, *(f"Left out: {why}." for why in unfinished)]) + "\n"


def _final(run: Results) -> float:
    return run.held_out[0].last.value


def interval(values: Sequence[float], form: str) -> str:
    """Returns mean ± half width of the interval, and whether it contains 0; of one value the value."""
    mean = f"{statistics.fmean(values):{form}}"
    if len(values) < 2:
        return mean
    quantile = T_975[min(len(values) - 1, len(T_975)) - 1]
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    unresolved = " (unresolved)" if form.startswith("+") and abs(statistics.fmean(values)) <= half else ""
    return f"{mean} ± {half:{form.removeprefix('+')}}{unresolved}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. A run that ends with an error ends the ladder with its exit code."""
    given, overrides = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        for seed in [] if given.report else given.seeds:
            for rung in given.rungs:
                say(f"{rung} · seed {seed}")
                if code := subprocess.call(command(rung, seed, given.out, overrides)):
                    end("the same command continues the ladder", code)
        ladder, unfinished = read_ladder(given.out, given.rungs, given.seeds)
        say(text := report(ladder, unfinished))
        write_text(given.out / "ablation.md", text)
        runs = {f"{rung}-seed{seed}": run.records for rung, of in ladder.items() for seed, run in of.items()}
        draw(runs, given.out / "ablation.png", ("step", "tokens", "seconds"))
    except KeyboardInterrupt:
        end("interrupted; the same command continues the ladder", 130)
    except (ValueError, OSError) as error:
        end(str(error), 1)


if __name__ == "__main__":
    main()
