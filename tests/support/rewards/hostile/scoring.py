"""The hostile corpus through real child processes, and everything that must hold afterwards.

In: items and a reward function; out: the verdicts with what was seen of the processes, and a list of the broken rules.
"""

import asyncio
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dapo.config.reward import LimitsConfig, RewardFunctionConfig
from dapo.rewards.calling import fork_server as child
from tests.support.rewards.hostile.corpus import Item
from workers.scoring.children import Children
from workers.scoring.verdict import Verdict

CPU_S = 2.5
WALL_S = 10.5
MEMORY_BYTES = 512 << 20
SLACK_BYTES = 16 << 20  # between the clean process, as seen here, and a child at the moment of its limit
AT_LIMIT = ("cpu", "memory")
SAMPLE_S = 0.02


@dataclass(frozen=True, slots=True)
class Run:
    """verdicts: one per item. respawned: children that were replaced. peaks: by child, the largest address space seen
    and its limit; base: the address space of the process that children come from; all in bytes.
    """

    verdicts: list[Verdict]
    respawned: int
    peaks: dict[int, tuple[int, int]]
    base: int

    def count(self, *failures: str) -> int:
        """Verdicts that ended so."""
        return sum(verdict.score.failure in failures for verdict in self.verdicts)

    def rewards(self) -> list[tuple[float, float]]:
        """What training sees."""
        return [(verdict.score.accuracy, verdict.score.reward) for verdict in self.verdicts]


def run(path: str, items: Sequence[Item], count: int, limits: LimitsConfig | None = None) -> Run:
    """Scores the items with the reward function `path` in `count` children, as many at a time as there are children."""
    return asyncio.run(_run(path, items, count, limits or LimitsConfig()))


async def _run(path: str, items: Sequence[Item], count: int, limits: LimitsConfig) -> Run:
    peaks: dict[int, tuple[int, int]] = {}
    async with Children([RewardFunctionConfig(path=path)], limits, count) as children:
        base = _status(children.about["pid"], "VmSize")
        watcher = asyncio.create_task(_watch(children, peaks))
        try:
            verdicts = await asyncio.gather(*(children.score(_sent(item)) for item in items))
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
        _look(children, peaks)
        return Run(verdicts=verdicts, respawned=children.respawned, peaks=peaks, base=base)


def _sent(item: Item) -> child.Item:
    """What a reward worker hands over."""
    extra_info = {"num_response_tokens": len(item.solution_str) // 4}
    return child.Item(source="hostile", text=item.solution_str, ground_truth=item.ground_truth, extra_info=extra_info)


async def _watch(children: Children, peaks: dict[int, tuple[int, int]]) -> None:
    while True:
        _look(children, peaks)
        await asyncio.sleep(SAMPLE_S)


def _look(children: Children, peaks: dict[int, tuple[int, int]]) -> None:
    """Notes the peak of every living child, which the kernel keeps, and its limit."""
    for pid in children.pids:
        with suppress(OSError, StopIteration):  # it may end meanwhile
            lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
            limit = next(line.split()[3] for line in lines if line.startswith("Max address space"))
            peaks[pid] = (_status(pid, "VmPeak"), sys.maxsize if limit == "unlimited" else int(limit))


def _status(pid: int, key: str) -> int:
    """Bytes of a line of /proc/PID/status, which counts in kB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def broken_rules(items: Sequence[Item], done: Run) -> list[str]:
    """One line per item or process that broke a rule; [] is wanted."""
    lines = [
        f"{item.kind}: {rule} · {ascii(item.solution_str[-120:])} · truth {item.ground_truth!r}"
        for item, verdict in zip(items, done.verdicts, strict=True)
        for rule in _broken(item, verdict)
    ]
    if not done.peaks:
        lines.append("nobody saw the memory of a child")
    for pid, (peak, limit) in done.peaks.items():
        if peak > limit or limit > done.base + MEMORY_BYTES + SLACK_BYTES:
            lines.append(f"child {pid} reached {peak} bytes, limit {limit}, base {done.base}")
    if done.respawned > 2 * done.count(*AT_LIMIT):  # a second time in a fresh process, where memory was short
        lines.append(f"{done.respawned} children were replaced for {done.count(*AT_LIMIT)} verdicts at a limit")
    return lines


def _broken(item: Item, verdict: Verdict) -> list[str]:
    score = verdict.score
    rules = []
    if score.accuracy != float(item.right) or score.reward != (1.0 if item.right else -1.0):
        rules.append(f"accuracy {score.accuracy}, reward {score.reward}, prediction {score.prediction!a}")
    if score.failure and (item.kind == "control" or score.failure not in AT_LIMIT):
        rules.append(f"failure {score.failure!r} ({verdict.detail})")
    if math.isnan(verdict.cpu_s) and score.failure != "memory" or verdict.cpu_s > CPU_S or verdict.wall_s > WALL_S:
        rules.append(f"{verdict.cpu_s:.2f} s CPU, {verdict.wall_s:.2f} s")
    return rules
