"""Compares how long the engines idle at a bounded staleness with what that bound itself forces.

A batch of version v may start when the engines serve v - K (`max_staleness`), takes G to generate even where nothing
else runs, and v + 1 is served an update and a sync after its end: K + 1 steps last at least G + update + sync. G is
that of the draws that a step used, all submitted at once and in draw order (`Simulation.oracle`).
"""

from dapo.simulate.books import Scenario, later
from dapo.simulate.rules import knowing, shy
from dapo.simulate.strategies import own, streaming

COLUMNS = (
    *("mixed rate", "slots", "staleness", "bound: step s", "bound: idle", "all-knowing: step s", "idle"),
    *("shy: step s", "idle", "wasted", "dapo: step s", "idle", "wasted"),
)


def forced(scenario: Scenario, max_staleness: int) -> tuple[float, float]:
    """Returns the least time of a step, in tokens of one slot, and the share of slot time that is idle then."""
    alone = streaming(scenario)
    work = later(alone.work)
    step = max(work, (later(alone.oracle) + scenario.update + scenario.sync) / (max_staleness + 1))
    return step, 1.0 - work / step


def cells(scenario: Scenario, max_staleness: int, seconds_per_token: float) -> list[str]:
    """Returns the cells of one line of the table."""
    step, idle = forced(scenario, max_staleness)
    row = [f"{scenario.workload.rate:g}", f"{scenario.engines} x {scenario.slots}", f"{max_staleness}"]
    row += [f"{step * seconds_per_token:.0f}", f"{idle:.1%}"]
    for rule in (knowing, shy, own):
        result = streaming(scenario, max_staleness=max_staleness, rule=rule)
        row += [f"{later(result.steps) * seconds_per_token:.0f}", f"{result.idle:.1%}"]
        row += [] if rule is knowing else [f"{result.wasted:.2%}"]
    return row
