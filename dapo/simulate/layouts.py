"""Compares layouts of the same GPUs: two pools, one time-shared pool, two pools of which one lends. The engines' pool
and the actors' pool have the same number of GPUs. An update on all of them is assumed to take half as long. A switch is
the time for engines to sleep or wake on GPUs that actors use too, including what the actors move."""

from collections.abc import Iterator
from dataclasses import replace

from dapo.sampling.lending import Lending
from dapo.simulate.books import Scenario, Simulation, later
from dapo.simulate.strategies import streaming

COLUMNS = ("layout", "GPUs", "staleness", "mixed rate", "step s", "engines' GPUs idle", "actors' GPUs idle", "wasted")


def rows(scenario: Scenario, switch: float, gpus_per_engine: int, seconds_per_token: float) -> Iterator[list[str]]:
    """Yields one row per layout. switch: its duration, in tokens of one slot."""
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
    return update * run.version / sum(run.steps)
