"""How many engines? Simulates a run with other numbers of engines, from what it has recorded (`dapo scale --advice`).

lengths, verdicts of groups ─▶ draws, resampled ─┐
seconds of responses ────────▶ speed of a slot ──┼─▶ `streaming`, per number of engines ─▶ table
update, sync, the rest of a step ────────────────┘
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dapo.algorithm.fate import TRAINED
from dapo.ground.table import table
from dapo.report.store.reader import Reader, Rows
from dapo.report.store.schema import DATABASE
from dapo.state.fleet_size import least_engines, want_engines
from dapo.state.lease import LEASE
from dapo.tools.simulate.fleet import ALWAYS, Attempt, Preemption, Recorded
from dapo.tools.simulate.strategies import Scenario, Simulation, later, streaming

Goal = Literal["cost", "seconds"]

NEWEST, LEAST = 50, 5  # steps of the run that count
EVERY, WORTH, LOOK_S = 10, 0.05, 5.0  # of `follow`
TIMES = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4)  # numbers of engines, against that of the run
CROWDING = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)
BINS = 8  # of the lengths
ALIKE = 1.1  # an error so much greater is as good
LOSSES, MOST_STEPS = 100, 1000  # losses of engines to be simulated, and steps for them at most
NEAR = 1.02  # so much slower than the fastest is as fast
MAX_NUM_SEQS = 256  # vLLM's, where the configuration does not say it
STEP, UPDATE, SYNC, DRIVER = "perf/step_s", "perf/update_s", "perf/sync_s", "perf/driver_s"
RUNNING, SPEED, CACHE = "perf/engine/running_mean", "perf/engine/tokens_per_s", "perf/engine/kv_use_mean"
NEEDED = (STEP, UPDATE, SYNC, DRIVER, RUNNING, SPEED, CACHE)
COLUMNS = ("engines", "step s", "usable groups / h", "{} / 1,000 groups", "engines idle", "wasted", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A run on paper. scenario: its times are in tokens of `token_s` seconds. step_s: as recorded. ranks: of the actor.
    staleness, admission: of its buffer."""

    scenario: Scenario
    token_s: float
    step_s: float
    ranks: int
    staleness: int
    admission: str

    def run(self, engines: int, preemption: Preemption = ALWAYS) -> Simulation:
        losses = self.step_s / self.token_s * engines * preemption.lost / preemption.back if preemption.lost else LOSSES
        steps = min(MOST_STEPS, max(self.scenario.steps, math.ceil(LOSSES / losses)))
        scenario = replace(self.scenario, engines=engines, preemption=preemption, steps=steps)
        return streaming(scenario, max_staleness=self.staleness, admission=self.admission)


class TooFewSteps(ValueError):
    """A run that goes on will have more."""


def model_of(run: Path) -> Model:
    """Raises TooFewSteps if the run has recorded too little, and ValueError if it has no engines of its own."""
    with Reader(run) as store:
        starts, found = store.starts(), store.metrics(*NEEDED, "perf/engine/[0-9]*/tokens_per_s")
        cfg = starts[-1]["config"] if starts else {}
        if not cfg or cfg["trainer"]["colocate"] != "none":
            raise ValueError(
                f"{run} has no engines with GPUs of their own (`trainer.colocate=none`): nothing to advise"
            )
        if missing := [name for name in NEEDED if name not in found]:
            raise TooFewSteps(f"{run} has no {', '.join(missing)} in its record: nothing to advise")
        engines = Counter(step for name, of_step in found.items() if name not in NEEDED for step in of_step)
        first = {min(start["steps"], default=0) for start in starts}  # engines and ranks warm up
        whole = [step for step in sorted(set.intersection(*(set(found[name]) for name in NEEDED))) if step not in first]
        steps = [step for step in whole if engines[step] == engines[whole[-1]]][-NEWEST:]
        if len(steps) < LEAST:
            raise TooFewSteps(
                f"{run} has {len(steps)} steps with its present number of engines, without the first step, and advice "
                f"needs {LEAST}: let it go on"
            )
        draws = [row for row in store.drawn(steps[0]) if row["step"] in steps]
    measured = {name: median(found[name][step] for step in steps) for name in NEEDED}
    slots = int(cfg["rollout"]["vllm"].get("max_num_seqs") or MAX_NUM_SEQS)
    held = measured[CACHE] * engines[steps[0]]  # cache that the running responses use
    scenario = Scenario(
        workload=Recorded(n=cfg["rollout"]["n"], draws=tuple(map(_attempt, draws))),
        engines=engines[steps[0]],
        slots=max(1, min(slots, int(measured[RUNNING] / held))) if held else slots,
        batch=cfg["data"]["train_batch_size"],
        steps=1 + NEWEST,
        in_flight=cfg["data"]["gen_batch_size"],
        filtered=cfg["filter_groups"]["enable"],
    )
    buffer = cfg["filter_groups"]
    model = Model(
        scenario=scenario,
        token_s=measured[RUNNING] / measured[SPEED],
        step_s=measured[STEP],
        ranks=cfg["actor"]["num_workers"],
        staleness=buffer["max_staleness"],
        admission=buffer["admission"],
    )
    return _fitted(model, measured, draws)


def _attempt(row: dict[str, Any]) -> Attempt:
    """A group that was trained on is mixed here, whatever made it usable, and no other is."""
    trained, accuracies = row["fate"] == TRAINED, [accuracy or 0.0 for accuracy in row["accuracy"]]
    right = [trained and each > min(accuracies) for each in accuracies]
    right[0] |= trained and not any(right)
    return Attempt(tuple(row["tokens"]), tuple(right))


def _fitted(model: Model, measured: Mapping[str, float], draws: Rows) -> Model:
    """Finds the speed of a slot and how it depends on the others of the engine: so that responses of each length take
    the seconds that they took. What is missing to the recorded step at staleness 0 counts as part of the update."""
    pairs = [pair for row in draws for pair in zip(row["tokens"], row["seconds"], strict=True) if pair[1] is not None]
    if not pairs:
        raise ValueError("the run has not recorded the seconds of its responses: nothing to advise")
    edges = np.unique(np.quantile([tokens for tokens, _ in pairs], np.arange(1, BINS) / BINS))
    taken, found = _curve(pairs, edges), []
    for crowding in CROWDING:
        model = _timed(model, measured[UPDATE] + measured[DRIVER], measured[SYNC], crowding=crowding)
        curve = _curve(model.run(model.scenario.engines).ended, edges)
        model = replace(model, token_s=float(taken @ curve / (curve @ curve)))
        found.append((float(np.linalg.norm(taken - model.token_s * curve)), model))
    best = min(error for error, _ in found)
    model = next(each for error, each in found if error <= ALIKE * best)  # full engines do not tell: the least then
    beside = measured[UPDATE] + measured[DRIVER]
    if not model.staleness:
        generation = later(model.run(model.scenario.engines).generation) * model.token_s
        beside = max(0.0, measured[STEP] - measured[SYNC] - generation)
    return _timed(model, beside, measured[SYNC], crowding=model.scenario.crowding)


def _timed(model: Model, update_s: float, sync_s: float, crowding: float) -> Model:
    update, sync = update_s / model.token_s, sync_s / model.token_s
    return replace(model, scenario=replace(model.scenario, crowding=crowding, update=update, sync=sync))


def _curve(ended: Sequence[tuple[int, float]], edges: NDArray[Any]) -> NDArray[Any]:
    """Mean time by length."""
    tokens, times = np.array(ended).T
    bins = np.digitize(tokens, edges)
    return np.bincount(bins, times, len(edges) + 1) / np.maximum(1, np.bincount(bins, minlength=len(edges) + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """seconds: of a step. cost: of 1,000 trained groups. idle: share of engine time. wasted: share of tokens."""

    engines: int
    seconds: float
    cost: float
    idle: float
    wasted: float


def forecasts(
    model: Model, among: Sequence[int], price: float | None, rank_price: float, preemption: Preemption
) -> list[Forecast]:
    """price, rank_price: per hour; price None: the cost is in engine hours. preemption: in seconds."""

    def forecast(engines: int) -> Forecast:
        done = model.run(engines, preemption.times(1 / model.token_s))
        seconds = later(done.steps) * model.token_s
        an_hour = done.present * (1.0 if price is None else price) + model.ranks * rank_price
        return Forecast(
            engines=engines,
            seconds=seconds,
            cost=1000 * an_hour * seconds / 3600 / model.scenario.batch,
            idle=done.idle,
            wasted=done.wasted,
        )

    return [forecast(engines) for engines in among]


def best(found: Sequence[Forecast], goal: Goal) -> Forecast:
    """The fewest engines, where several are about as fast."""
    if goal == "cost":
        return min(found, key=lambda each: each.cost)
    near = NEAR * min(each.seconds for each in found)
    return min((each for each in found if each.seconds <= near), key=lambda each: each.engines)


def advice(run: Path, among: Sequence[int], price: float | None, rank_price: float, preemption: Preemption) -> str:
    """price, rank_price, preemption: as in `forecasts`."""
    model = model_of(run)
    own = model.scenario.engines
    among = among or sorted({max(1, round(own * factor)) for factor in TIMES})
    found = forecasts(model, among, price, rank_price, preemption)
    goals: tuple[Goal, ...] = ("cost", "seconds")
    rows = [
        [
            str(each.engines),
            f"{each.seconds:.2f}",
            f"{3600 / each.seconds * model.scenario.batch:,.0f}",
            f"{each.cost:.3g}",
            f"{each.idle:.0%}",
            f"{each.wasted:.1%}",
            ", ".join(f"least {goal}" for goal in goals if each is best(found, goal)),
        ]
        for each in found
    ]
    known = (
        f"recorded: {own} engines, {model.step_s:.2f} s a step; simulated with {model.scenario.slots} slots an engine, "
        f"{1 / model.token_s:.1f} tokens/s each when all are in use"
    )
    unit = "engine hours" if price is None else "money"
    return "\n".join([known, "", table([name.format(unit) for name in COLUMNS], rows)])


def follow(run: Path, goal: Goal, among: Sequence[int], ask: Callable[[Model, Sequence[int]], list[Forecast]]) -> None:
    """Has a run take the best of these numbers of engines, every `EVERY` steps, until it ends. It stays as it is if
    none is better by more than `WORTH`. ask: returns forecasts. Raises ValueError if no run goes on there, if it cannot
    be advised, or if it may not have so few."""
    if min(among) < (least := least_engines(run)):
        raise ValueError(f"--among {min(among)} is less than `rollout.min_engines` ({least}) of {run}")
    if not (run / LEASE).exists():
        raise ValueError(f"no run goes on in {run}: --follow is for one that does")
    decided = -EVERY
    while (run / LEASE).exists():
        if (step := _last_step(run)) - decided >= EVERY:
            with suppress(TooFewSteps):
                model = model_of(run)
                now, *found = ask(model, [model.scenario.engines, *among])
                chosen, decided = best(found, goal), step
                better = 1 - getattr(chosen, goal) / getattr(now, goal)
                takes = f"step {step}: {now.engines} engines take {now.seconds:.2f} s a step"
                if better > WORTH:
                    want_engines(run, chosen.engines)
                    takes += f"; {chosen.engines} are wanted: {chosen.seconds:.2f} s, {better:.0%} less {goal}"
                print(takes, flush=True)
        time.sleep(LOOK_S)


def _last_step(run: Path) -> int:
    if not (run / DATABASE).exists():  # the run has not got so far
        return -EVERY
    with Reader(run) as store:
        return max(store.metrics(STEP).get(STEP, ()), default=0)
