"""Writes the summary of a run at its end: `summary.json`, `curves.png`, and a few lines on the console. A failure here
is only a warning and does not change how the run ends."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from dapo.ground.console import say, warn
from dapo.ground.durable import write_text
from dapo.ground.table import duration
from dapo.report.log import METRICS
from dapo.report.store.reader import PHASES
from dapo.results.figures import Accuracy, Difference, Point, Results, results
from dapo.results.runs import read_run
from dapo.state.lease import LeaseLost

SUMMARY, CURVES = "summary.json", "curves.png"
HELD_OUT, DRAWN = "held-out accuracy", "accuracy of drawn groups"


@contextmanager
def concluded(folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """Writes the summary of `folder` at the end of the block, however it ends, if the block has logged metrics. check:
    raises LeaseLost if another run owns the folder by then; nothing is written in that case."""
    before = _written(folder)
    try:
        yield
    finally:
        if _written(folder) != before:
            conclude(folder, check)


def _written(folder: Path) -> int:
    path = folder / METRICS
    return path.stat().st_mtime_ns if path.exists() else 0


def conclude(folder: Path, check: Callable[[], None]) -> None:
    """Writes the files and prints the summary; does nothing without a step. check: as in `concluded`."""
    try:
        check()
        run = read_run(folder)
        if not run.steps:
            return
        found = results(run)
        write_text(folder / SUMMARY, json.dumps(asdict(found), indent=1) + "\n")
        say(text(found))
        exports = sorted(folder.glob("checkpoints/step_*/hf"))
        say(f"  model: {exports[-1] if exports else 'none was saved'}; to look at the run: dapo inspect {folder}")
        from dapo.results.plot import draw, title_of  # matplotlib takes a second, and only here

        draw({run.name: run.records}, folder / CURVES, title=title_of([run]))
    except LeaseLost:
        return
    except Exception as error:  # whatever a disk, a library or a damaged file raises
        warn(f"the summary of {folder} is not complete: {type(error).__name__}: {error}")


def text(found: Results) -> str:
    """Returns the lines of the summary; 95 % confidence intervals in brackets, see `Results`."""
    steps = f"steps {taken(found)}" if found.first_step > 1 else f"{taken(found)} steps"
    begun = f", started {found.starts} times" if (found.starts or 0) > 1 else ""
    lines = [f"summary: {steps} in {duration(found.seconds['wall'])}{begun}"]
    lines += [_moved(f"{HELD_OUT} {one.set}".rstrip(), one) for one in found.held_out]
    if found.drawn and not found.held_out:
        lines.append(_moved(DRAWN, found.drawn))
    if found.tokens_generated is not None:
        trained = f"{found.tokens_trained:,} of them trained on (goodput {shown(found.goodput)})"
        lines.append(f"tokens: {found.tokens_generated:,} generated, {trained}")
    lines.append(f"time: {_phases(found)} of {duration(found.seconds['steps'])} in steps; phases overlap")
    lines.append(f"survived: {faults(found)}")
    lines.append(f"cost: {cost(found)}")
    return "\n  ".join(lines)


def taken(found: Results) -> str:
    """Returns the steps taken of all steps; as a range if the run did not begin with the first one."""
    of = f" of {found.total_steps}" if found.total_steps else ""
    return (f"{found.first_step} to {found.last_step}" if found.first_step > 1 else f"{found.steps}") + of


def _moved(name: str, one: Accuracy) -> str:
    moved = f"{name}: {point(one.first)} at step {one.first.step} -> {point(one.last)} at step {one.last.step}"
    best = f"; best {shown(one.best.value)} at step {one.best.step}" if one.best.value > one.last.value else ""
    gain = f"; gain {difference(one.gain)}" if one.gain else ""
    return f"{moved}{gain}{best}"


def shown(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def point(one: Point) -> str:
    return shown(one.value) + (f" ({one.low:.3f} to {one.high:.3f})" if one.low is not None else "")


def difference(one: Difference) -> str:
    return f"{one.value:+.3f} ({one.low:+.3f} to {one.high:+.3f}) over {one.problems} problems"


def _phases(found: Results) -> str:
    least = found.seconds["steps"] / 100
    taken = sorted((name for name in PHASES if found.seconds[name] >= least), key=lambda name: -found.seconds[name])
    return ", ".join(f"{name} {share(found, name)}" for name in taken) or "-"


def share(found: Results, phase: str) -> str:
    return f"{found.seconds[phase] / found.seconds['steps']:.0%}" if found.seconds[phase] else "-"


def faults(found: Results) -> str:
    counts = [f"{name.replace('_', ' ')} {count}" for name, count in found.faults.items() if count]
    return ", ".join(counts) or "no fault"


def cost(found: Results) -> str:
    if found.gpu_hours is None:
        return "-"
    return f"{found.gpu_hours:,.1f} GPU hours ({found.gpus} GPUs)" if found.gpu_hours else "CPU, no GPU hours"
