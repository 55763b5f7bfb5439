"""Stand-ins for the engines' side of a weight sync, which record what they are asked (tests only)."""

import asyncio
from copy import deepcopy
from functools import wraps

import numpy as np

from dapo.config.schema import Config
from dapo.types import TrainSequence
from dapo.workers.weight_sync import WeightSync
from dapo.workers.weights.bucket import Bucket, BucketPlan, Endpoint

BUCKETS = 6
STEP_S = 0.01


def within(cfg: Config, transport: str, timeout_s: float = 30) -> Config:
    """The configuration with a transport and a deadline for a sync."""
    cfg = deepcopy(cfg)
    cfg.weight_sync.transport, cfg.weight_sync.timeout_s = transport, timeout_s
    return cfg


def in_loop(test):
    """The coroutine as a test."""

    @wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def loads(events: list[str]) -> list[int]:
    """The buckets that engines began to load, in order."""
    return [int(event.split()[1]) for event in events if event.startswith("load") and "done" not in event]


class Recorder:
    """Both ends of a sync. A step takes `STEP_S` and is noted at its begin and end; `fail` may raise at a begin."""

    def __init__(self, fail=lambda step, index: None) -> None:
        self.events: list[str] = []
        self.opened: list[str] = []  # transports
        self.gathered: list[str] = []  # the transport of each bucket
        self.existing = self.most = 0
        self.refused = ""
        self.engines: tuple[int, ...] = (0, 1, 2)
        self.lost: list[tuple[int, ...]] = []  # engines that are found lost, at each failure in turn
        self.admitted: list[tuple[int, ...]] = []
        self.canary: list[TrainSequence] = []
        self.awake = True
        self.lent: tuple[int, ...] = ()
        self.asked_idle = 0
        self.serving: tuple[int, ...] = ()  # engines that serve although they ask to join
        self.turns = 0  # how often the engines that are lent GPUs got them
        self.dropped: list[tuple[int, ...]] = []
        self.lighter: list[bool] = []  # whether the engines sleep again less deep, at each time that this is asked
        self.outside: dict[int, int] = {}
        self.proven: set[int] = set()
        self.outside_serving: set[int] = set()
        self.fetched: list[tuple[int, int]] = []
        self._fail = fail

    def restarts(self):
        return {}

    def members(self, *, lent=False):
        return tuple(k for k in self.engines if (k in self.lent) == lent)

    def is_lent(self, number):
        return number in self.lent

    def serves(self, number):
        return number in self.serving

    def has_turn(self, number):
        return self.awake

    def lend(self):
        self.turns += 1

    def drop(self, members):
        self.dropped.append(members)
        self.engines = tuple(k for k in self.engines if k not in members)

    def identities(self, members):
        return tuple((k, 0) for k in members)

    def num_receivers(self, members):
        return len(members)

    async def lose_silent(self, members, grace_s):
        lost = self.lost.pop(0) if self.lost else ()
        self.events.append("lose silent")
        self.engines = tuple(k for k in self.engines if k not in lost)
        return bool(lost)

    async def canaries(self, members):
        return self.canary

    async def policy_logprobs(self, sequences):
        return [np.zeros_like(sequence.rollout_logprobs) for sequence in sequences]

    async def sleep(self):
        await self._step("sleep", 0)
        self.awake = False

    async def sleep_lighter(self, why):
        self.events.append(f"asked: {why}")
        return self.lighter.pop(0) if self.lighter else False

    def take_weights(self, rejoin, supply=None):
        pass

    # Engines outside of the cluster, by number: the version of each, and those that agree with the actors.

    def version(self, number):
        return self.outside[number]

    def is_proven(self, number):
        return number in self.proven

    def outdate(self, oldest):
        for number, version in self.outside.items():
            if version < oldest:
                self.outside[number] = -1
                self.outside_serving.discard(number)

    async def fetch(self, number, bucket, what, timeout_s):
        self.fetched.append((number, bucket.index))
        await self._step("fetch", bucket.index)

    async def load(self, number, version, keep, buckets, timeout_s):
        assert [bucket.file for bucket in buckets] == [f"file {index}" for index in range(BUCKETS)]
        await self._step("load version", version)
        self.outside[number] = version

    async def stored_weights(self, others):
        await self._step("store", 0)
        return [(f"digest {index}", f"file {index}") for index in range(BUCKETS)]

    def admit(self, members):
        if outside := self.outside.keys() & members:
            self.proven |= outside
            self.outside_serving |= outside
            return
        self.awake = True
        self.admitted.append(members)

    async def _step(self, step: str, index: int) -> None:
        self.events.append(f"{step} {index}")
        self._fail(step, index)
        await asyncio.sleep(STEP_S)
        self.events.append(f"{step} {index} done")

    async def until_idle(self):
        self.asked_idle += 1

    async def open_weights(self, transport):
        self.transport = transport
        self.opened.append(transport)
        return BUCKETS, [Endpoint(capacity=80, address="here", port=7), None]

    async def join_weights(self, transport, num_receivers):
        await self._step("join", num_receivers)

    async def close_weights(self, transport):
        self.events.append(f"close {transport}")

    async def gather_bucket(self, transport, index, what):
        self.gathered.append(transport)
        self.existing += 1
        self.most = max(self.most, self.existing)
        await self._step("gather", index)
        return Bucket(index=index, plan=BucketPlan((), 8), dtype="float32", digest="")

    async def leave_weights(self, members, timeout_s):
        await self._step("leave", len(members))

    async def connect_weights(self, info, members, timeout_s):
        self.info = info
        await self._step("connect", info["group_size"])

    async def start_update(self, version, keep, members, timeout_s):
        await self._step("start", 0)

    async def load_bucket(self, bucket, what, members, timeout_s):
        assert f"weight bucket {bucket.index} of {BUCKETS}" in what
        await self._step("load", bucket.index)
        self.existing -= 1

    async def finish_update(self, version, members, timeout_s):
        await self._step("finish", version)

    def refuse(self, reason):
        self.refused = reason

    def sync(self, timeout_s: float = 10, staleness: int = 0) -> WeightSync:
        cfg = within(Config(), "broadcast", timeout_s)
        cfg.filter_groups.max_staleness = staleness
        return WeightSync(self, self, cfg)
