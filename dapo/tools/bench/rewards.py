"""Measures throughput and latency of scoring, by reward function and number of child processes. Typical answers of
about 2,000 characters go through the child processes of one reward worker. They are measured in the process that owns
them, as in a reward actor, without Ray. The same function is also called directly in this process, without isolation.
CPU time per core counts this process, the children and the fork server."""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

import psutil

from dapo.config.reward import LimitsConfig, RewardFunctionConfig
from dapo.ground.table import table
from dapo.rewards.calling.fork_server import Item
from dapo.rewards.calling.functions import RewardFunctions
from dapo.workers.scoring.children import Children

WANTED_PER_CORE = 2000.0  # verdicts per second
WANTED_P50_MS = 1.0
CHARS = 2000
AT_ONCE = 16  # responses in flight per child, as many as a group has
WARM_UP = 500
WORDS = (*"then we add both sides and find that equals 12, so".split(), "$x^2 + 3x$", "= 40.5", "\n")
ANSWERS = ("{}", "${}$", "\\boxed{{{}}}", "**{}**", "{}.", "x = {}", "{}.0", "{} dollars")
LAST_LINES = {"gsm8k": "#### {}"}  # of functions that do not look for a label


def ordinary_answers(count: int, function: str) -> list[Item]:
    """Returns worked solutions to integer problems, in usual spellings; about half of them are correct."""
    rng = random.Random(0)
    items: list[Item] = []
    for _ in range(count):
        words: list[str] = rng.choices(WORDS, k=CHARS // 4)
        truth = rng.randrange(1, 5000)
        answer = truth if rng.random() < 0.5 else truth + 1
        last = LAST_LINES.get(function, "Answer: {}").format(rng.choice(ANSWERS).format(answer))
        items.append(
            Item(
                source="benchmark",
                text=f"{' '.join(words)[:CHARS]}\n{last}",
                ground_truth=str(truth),
                extra_info={"index": len(items), "num_response_tokens": CHARS // 4},
            )
        )
    return items


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Returns the CPU time so far of the processes and of the children they have waited for."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


async def drain(children: Children, items: Iterator[Item], seconds: list[float], right: list[float]) -> None:
    """Scores the remaining items one after the other; appends the seconds and the accuracy of each."""
    for item in items:
        began = time.perf_counter()
        verdict = await children.score(item)
        seconds.append(time.perf_counter() - began)
        if verdict.score.failure:
            raise RuntimeError(f"an ordinary answer was not scored ({verdict.score.failure}): {verdict.detail}")
        right.append(verdict.score.accuracy)


async def measure(given: argparse.Namespace, items: list[Item]) -> tuple[dict[str, float], list[float]]:
    """Returns figures by column name, and the accuracy of each item. All items are scored at full load, then a tenth of
    them one at a time per child, which gives the latency. Raises RuntimeError if an item is not scored."""
    seconds: list[float] = []
    right: list[float] = []
    async with Children([RewardFunctionConfig(path=given.function)], LimitsConfig(), given.children) as children:
        await drain(children, iter(items[:WARM_UP]), [], [])
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        cpu_s, began = cpu_seconds(processes), time.perf_counter()
        queue = iter(items)
        await asyncio.gather(*(drain(children, queue, [], right) for _ in range(AT_ONCE * given.children)))
        wall_s, cpu_s = time.perf_counter() - began, cpu_seconds(processes) - cpu_s
        queue = iter(items[: len(items) // 10])
        await asyncio.gather(*(drain(children, queue, seconds, []) for _ in range(given.children)))
    return {
        "verdicts/s": len(items) / wall_s,
        "cores used": cpu_s / wall_s,
        "verdicts/s per core": len(items) / cpu_s,
        "p50 ms": 1e3 * statistics.median(seconds),
        "p99 ms": 1e3 * statistics.quantiles(seconds, n=100)[98],
    }, right


def bare(function: str, items: list[Item]) -> float:
    functions = RewardFunctions([RewardFunctionConfig(path=function)])
    began = time.perf_counter()
    for item in items:
        functions.score(item.source, item.text, item.ground_truth, item.extra_info)
    return len(items) / (time.perf_counter() - began)


def run(given: argparse.Namespace) -> None:
    items = ordinary_answers(given.responses, given.function)
    figures, right = asyncio.run(measure(given, items))
    figures["bare calls/s"] = bare(given.function, items)
    figures["bare / isolated"] = figures["bare calls/s"] / figures["verdicts/s per core"]
    cells = [f"{value:.0f}" if "/s" in name else f"{value:.2f}" for name, value in figures.items()]
    print(f"{given.responses} responses of {CHARS} characters, {statistics.fmean(right):.0%} right")
    print(table(["function", "children", *figures], [[given.function, str(given.children), *cells]]))
    print(f"wanted of `math`: {WANTED_PER_CORE:.0f} verdicts/s per core or more, p50 of {WANTED_P50_MS:g} ms or less")
