"""Calls reward functions on made-up answers without a reward worker, in a child of their fork server: the process and
the limits that they have in a run.

    caller ──functions──▶ fork server ──fork──▶ child ──one answer at a time──▶ `Given`
"""

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from dapo.config.reward import LimitsConfig, RewardFunctionConfig
from dapo.rewards.calling.by_entry import as_values
from dapo.rewards.calling.fork_server import Item
from dapo.rewards.calling.process import Child, ForkServer

TOKENS = 4  # length of the made-up answers


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a function is given beside the answer."""

    source: str
    truth: str
    extra_info: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What a function gave for one answer. score: before its weight; None for None or NaN. accuracy: as a run counts
    it. error: why there is no score. ended: whether its process ended, as at a limit."""

    score: float | None = None
    accuracy: float | None = None
    pred: str = ""
    error: str = ""
    ended: bool = False

    @property
    def is_right(self) -> bool:
        return self.accuracy is not None and self.accuracy > 0.5


class Caller:
    """Calls one function in one child; another child replaces one that has ended."""

    def __init__(self, server: ForkServer, entry: str, limits: LimitsConfig) -> None:
        self._server, self._entry, self._limits = server, entry, limits
        self._child: Child | None = None

    async def __call__(self, row: Row, text: str) -> Given:
        child = self._child = self._child or await self._server.fork()
        extra = {**row.extra_info, "num_response_tokens": TOKENS}
        item = Item(source=row.source, text=text, ground_truth=row.truth, extra_info=extra, entry=self._entry)
        reply = await child.ask({**item.request(None), "given": {}}, self._limits)
        if reply is None:
            self._child = None
            return Given(error=self._why(child), ended=True)
        if "error" in reply:
            return Given(error=str(reply["error"]))
        [score] = reply["parts"].values()
        return Given(score=_number(score), accuracy=_number(reply["accuracy"]), pred=str(reply["prediction"]))

    def _why(self, child: Child) -> str:
        if child.failure not in ("cpu", "memory", "wall"):
            return child.detail
        key, unit = ("memory_bytes", "bytes") if child.failure == "memory" else (f"{child.failure}_s", "s")
        value = f"{getattr(self._limits, key):,.10g} {unit}"
        return f"it needs more than `reward.limits.{key}` ({value}); raise that if it may"


@asynccontextmanager
async def fork_server(functions: Mapping[str, RewardFunctionConfig], limits: LimitsConfig) -> AsyncIterator[ForkServer]:
    """Starts the fork server of these functions, by entry; the first entry is "". Raises ValueError, RuntimeError."""
    own = {entry: [spec] for entry, spec in functions.items() if entry}
    server = await ForkServer.start({"functions": as_values([functions[""]], own), "limits": asdict(limits)})
    try:
        yield server
    finally:
        server.kill()


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
