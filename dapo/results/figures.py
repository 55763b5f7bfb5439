"""Computes the results of a run: first and last accuracy, tokens, seconds, faults, GPU hours. `dapo.results.runs` reads
the input; `summary.json`, `dapo.compare` and the end of a run show the `Results`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from dapo.evaluation.estimates import Estimate, over_problems
from dapo.report.store.reader import PHASES
from dapo.results.runs import ACCURACY, Problems, Records, Run, known
from dapo.state.changes import value_of

WINDOW = 10  # steps that stand for the beginning and the end of a curve
# NAME in `perf/restarted_NAME`.
RESTARTED = ("engines", "actors", "reward_workers", "reward_children", "function_workers", "judges")
LATEST = ("rollout/response_length_mean", "rollout/truncated", "actor/entropy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """An accuracy and its 95 % confidence interval, None if there is none. step: the policy version; of a window of
    steps, the outermost."""

    step: int
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Mean difference of accuracy over the problems that both sides answered, with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    problems: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Accuracy over the steps of a run. set: of held-out problems; "" for the unnamed one, or the mean over sets;
    SOURCE or SET/SOURCE for a data source of a set that has several. gain: of a set, paired by problem; None if
    the first and the last evaluation of the run are not known to share one of its problems."""

    set: str
    first: Point
    last: Point
    best: Point
    gain: Difference | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Results of a run; None: not known. Made by `results`.

    steps: number of steps, from first_step to last_step; 0 without any; a run that starts from another run's checkpoint
    continues its numbering. held_out: one per set, intervals over problems. drawn: of the sampled groups, means of the
    first and last steps (at most `WINDOW` each), intervals over steps. seconds: `wall` of all starts, `steps` of the
    steps that count, and of these by phase; phases overlap. faults: counts of survived faults. gpus: of the newest
    start; 0: CPU. latest: means of the last steps. inputs: what the run read, with commits.
    """

    name: str
    steps: int
    first_step: int
    last_step: int
    total_steps: int | None
    held_out: tuple[Accuracy, ...]
    drawn: Accuracy | None
    tokens_generated: int | None
    tokens_trained: int | None
    goodput: float | None
    seconds: dict[str, float]
    starts: int | None
    faults: dict[str, int]
    gpus: int | None
    gpu_hours: float | None
    latest: dict[str, float | None]
    inputs: dict[str, str]


def results(run: Run) -> Results:
    steps = run.steps
    last = steps[-1] if steps else {}
    generated, goodput = known(last, "ledger/tokens_generated"), known(last, "ledger/goodput")
    seconds = {name: sum(known(record, f"perf/{name}_s") or 0.0 for record in steps) for name in PHASES}
    taken = sum(record["perf/step_s"] for record in steps)
    wall = sum(start.seconds for start in run.starts) if run.starts else taken
    hours = sum(start.gpus * start.seconds for start in run.starts) / 3600
    return Results(
        name=run.name,
        steps=len(steps),
        first_step=steps[0]["step"] if steps else 0,
        last_step=steps[-1]["step"] if steps else 0,
        total_steps=value_of(run.config, "trainer.total_steps"),
        held_out=tuple(_held_out(run)),
        drawn=_drawn(steps),
        tokens_generated=None if generated is None else round(generated),
        tokens_trained=None if generated is None or goodput is None else round(goodput * generated),
        goodput=goodput,
        seconds={"wall": wall, "steps": taken, **seconds},
        starts=len(run.starts) or None,
        faults=_faults(run),
        gpus=run.starts[-1].gpus if run.starts else None,
        gpu_hours=hours if run.starts else None,
        latest={name: _mean([known(record, name) for record in steps[-WINDOW:]]) for name in LATEST},
        inputs=dict(run.inputs),
    )


def _held_out(run: Run) -> list[Accuracy]:
    gains = differences(*run.problems) if len(run.problems) == 2 else {}
    matches = (match for record in run.records for name in record if (match := ACCURACY.fullmatch(name)))
    found = []
    for name, metric in sorted({match[1] or "": match[0] for match in matches}.items()):
        records = {record["step"]: record for record in run.records if known(record, metric) is not None}
        points = [
            Point(step=step, value=one[metric], low=known(one, f"{metric}_low"), high=known(one, f"{metric}_high"))
            for step, one in sorted(records.items())
        ]
        if points:
            best = max(points, key=lambda point: point.value)
            found.append(Accuracy(set=name, first=points[0], last=points[-1], best=best, gain=gains.get(name)))
    return found


def _drawn(steps: Records) -> Accuracy | None:
    scored = [record for record in steps if known(record, "rollout/accuracy") is not None]
    if not scored:
        return None
    window = max(1, min(WINDOW, len(scored) // 2))
    sums = list(accumulate((record["rollout/accuracy"] for record in scored), initial=0.0))
    best = max(range(window, len(scored) + 1), key=lambda end: sums[end] - sums[end - window])
    return Accuracy(
        set="",
        first=_over_steps(scored[:window], scored[0]["step"]),
        last=_over_steps(scored[-window:], scored[-1]["step"]),
        best=_over_steps(scored[best - window : best], scored[best - 1]["step"]),
    )


def _over_steps(records: Records, step: int) -> Point:
    one = over_problems({"": [record["rollout/accuracy"] for record in records]})[""]
    alone = len(records) < 2  # no interval
    return Point(step=step, value=one.value, low=None if alone else one.low, high=None if alone else one.high)


def differences(before: Problems, after: Problems) -> dict[str, Difference]:
    """Returns the gain of `after` over the problems that both scored, by set."""
    found = {}
    for name in dict.fromkeys(problem.set for problem in after):
        if both := _paired(*({key: one[key] for key in one if key.set == name} for one in (before, after))):
            one: Estimate = over_problems({"": both})[""]
            found[name] = Difference(value=one.value, low=one.low, high=one.high, problems=len(both))
    return found


def _paired(before: Problems, after: Problems) -> list[float]:
    """Returns the differences over the problems of one set that both have. Problems are matched by text. If no text is
    in both (another chat template, or a date in it), they are matched by number, provided that the ground truths agree
    between both and differ among the problems."""
    there, here = ({(key.text, key.ground_truth): one[key] for key in one} for one in (before, after))
    if both := [here[key] - there[key] for key in here if key in there]:
        return both
    numbered = {key.number: key for key in before}
    pairs = [(numbered[key.number], key) for key in after if key.number in numbered]
    same = all(one.ground_truth == other.ground_truth for one, other in pairs)
    told = len({one.ground_truth for one, _ in pairs}) > 1
    return [after[other] - before[one] for one, other in pairs] if same and told else []


def _faults(run: Run) -> dict[str, int]:
    """Counts survived faults. The metrics begin at 0 with each start."""
    start_of = {step: number for number, start in enumerate(run.starts) for step in start.steps}
    found = {}
    for name in RESTARTED:
        total = before = start = 0.0
        for record in run.steps:
            value, here = known(record, f"perf/restarted_{name}") or 0.0, start_of.get(record["step"], start)
            total += value if here != start or value < before else value - before
            before, start = value, here
        found[f"restarted_{name}"] = round(total)
    if run.failed_saves is not None:
        found["failed_saves"] = run.failed_saves
        found["killed_starts"] = sum(not start.ended for start in run.starts[:-1])  # the newest may be running
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
