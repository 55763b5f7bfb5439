"""Compares what may be done with the same GPUs: two pools, one pool in turns, two pools of which one lends.

The engines' pool and the actors' have as many GPUs each. An update on all of them takes half as long: it is assumed to
scale. A switch is what engines take to sleep, or to wake, on GPUs that actors use too, with what the actors move.
"""

from collections.abc import Iterator
from dataclasses import replace

from dapo.sampling.lending import Lending
from dapo.simulate.books import Scenario, Simulation, later
from dapo.simulate.strategies import streaming

COLUMNS = ("layout", "GPUs", "staleness", "mixed rate", "step s", "engines' GPUs idle", "actors' GPUs idle", "wasted")


def rows(scenario: Scenario, switch: float, gpus_per_engine: int, seconds_per_token: float) -> Iterator[list[str]]:
    """Yields one line of the table per layout. switch: its time, in tokens of one slot."""
    half = scenario.engines * gpus_per_engine
    slots = scenario.engines * scenario.slots
    lending = Lending(own=slots, lent=slots, wake_s=switch, sleep_s=switch)

    def line(name: str, gpus: str, staleness: int, run: Simulation, idle: tuple[float, float]) -> list[str]:
        shares = [f"{share:.1%}" for share in idle]
        step = f"{later(run.steps) * seconds_per_token:.0f}"
        return [name, gpus, f"{staleness}", f"{scenario.workload.rate:g}", step, *shares, f"{run.wasted:.2%}"]

    for staleness in (0, 1):
        run = streaming(scenario, max_staleness=staleness)
        yield line("separate", f"{half}+{half}", staleness, run, (run.idle, 1.0 - training(run, scenario.update)))
    update = scenario.update / 2
    run = streaming(replace(scenario, engines=2 * scenario.engines, update=update + 2 * switch))
    idle = run.idle - training(run, update)
    yield line("time-shared", f"{2 * half}", 0, run, (idle, idle))
    for staleness in (0, 1):
        run = streaming(scenario, max_staleness=staleness, lending=lending)
        idle = 1.0 - training(run, scenario.update) - run.lent
        yield line("lending", f"{half}+{half}", staleness, run, (run.idle, idle))


def training(run: Simulation, update: float) -> float:
    """Returns the share of the time that the updates took."""
    return update * run.version / sum(run.steps)
