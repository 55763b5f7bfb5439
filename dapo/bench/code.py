"""Measures how many programs a second the sandbox runs: short solutions in, a table out.

Solutions of a few lines, of one test each, go through the child processes of one reward worker and the sandbox beside
them. The yardstick is the time of a bare `python -c pass`, with this interpreter and without confinement. A core's
share counts the CPU time of this process, the children, both fork servers and every program.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys

import psutil

from dapo.bench.rewards import measure
from dapo.report.table import table
from dapo.rewards.calling.fork_server import Item

WANTED_PER_CORE = 50.0  # programs per second
AT_ONCE = 4  # responses that wait for each child
WARM_UP = 10
MIN_PROGRAMS = 20
YARDSTICK = 20  # starts of a bare interpreter
PROGRAMS = (
    "print(sum(map(int, input().split())))",
    "v = list(map(int, input().split()))\ntotal = 0\nfor x in v:\n    total += x\nprint(total)",
    "import sys\nfrom functools import reduce\nprint(reduce(lambda a, b: a + b, map(int, sys.stdin.read().split())))",
    "class Adder:\n    def __init__(self, v):\n        self.v = v\n    def run(self):\n        return sum(self.v)\n"
    "print(Adder([int(x) for x in input().split()]).run())",
)


def short_solutions(count: int) -> list[Item]:
    """Returns right and wrong solutions to sums, about half of each."""
    rng = random.Random(0)
    items: list[Item] = []
    for index in range(count):
        numbers = [rng.randrange(1000) for _ in range(20)]
        expected = sum(numbers) + (rng.random() < 0.5)
        truth = {"inputs": [" ".join(map(str, numbers))], "outputs": [str(expected)]}
        text = f"We add them up.\n```python\n{PROGRAMS[index % len(PROGRAMS)]}\n```\n"
        items.append(Item(source="benchmark", text=text, ground_truth=json.dumps(truth), extra_info={}))
    return items


def bare() -> float:
    """Returns starts of an interpreter that does nothing, per second of CPU time."""
    before = psutil.Process().cpu_times()
    for _ in range(YARDSTICK):
        subprocess.run([sys.executable, "-c", "pass"], check=True)
    after = psutil.Process().cpu_times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return YARDSTICK / max(spent, 1e-9)


def run(given: argparse.Namespace) -> None:
    """Prints a table and what is wanted. Raises ValueError for too few programs."""
    if given.programs < MIN_PROGRAMS:
        raise ValueError(f"`--programs` ({given.programs}) must be at least {MIN_PROGRAMS}; more give steadier figures")
    items = short_solutions(given.programs)
    scored = measure("code", given.children, items, "programs", warm_up=WARM_UP, at_once=AT_ONCE)
    figures, right = asyncio.run(scored)
    figures["bare starts/s per core"] = bare()
    cells = [f"{value:.0f}" if "/s" in name else f"{value:.2f}" for name, value in figures.items()]
    print(f"{given.programs} programs, {statistics.fmean(right):.0%} right")
    print(table(["children", *figures], [[str(given.children), *cells]]))
    print(f"wanted: {WANTED_PER_CORE:.0f} programs/s per core or more")
