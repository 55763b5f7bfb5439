"""Engines in the test's own process, under the real `RolloutPool`: each token is written down as it is made.

The next token is a function of the request's seed and of the place within the response, as vLLM's noise is. The
log-probability of a token is its number in the log, negative, so that every token can be told from every other.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dapo.config.sampling import RolloutConfig
from dapo.sampling.seeds import response_seed
from dapo.types import Experts, Int32Array, Response, Sampling, Support, VersionSpan
from dapo.workers.capacity import EngineSize, FleetCapacity
from dapo.workers.engines.slot import EngineSlot
from dapo.workers.engines.worker import Start
from dapo.workers.remote import WorkerLost
from dapo.workers.rollout import RolloutPool

STOP = 0
SLOTS = 16
TOGETHER = 3  # turns of the event loop in which responses that end travel together


class Token(NamedTuple):
    """place: in its response. noise: seed of its request, and the place."""

    token: int
    place: int
    version: int
    noise: tuple[int, int]


@dataclass
class World:
    """What all engines share. log: every token. lost: numbers of those that were in an engine when it died."""

    rng: random.Random
    version: int = 0
    log: list[Token] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)


class Engine:
    """Fulfils what the pool asks of a `RolloutWorker`, as attributes with `remote`."""

    def __init__(self, world: World) -> None:
        self.dead = False
        self._world = world
        self._known: dict[str, bool] = {}  # groups: whether they were asked to end
        self.generate = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._generate))
        self.abort = SimpleNamespace(remote=self._abort)

    async def _abort(self, keys: Sequence[str]) -> None:
        await asyncio.sleep(0)
        if self.dead:
            raise WorkerLost("killed")
        self._known.update({key: True for key in keys if key in self._known})

    async def _generate(
        self, key: str, prompt: Int32Array, sampling: Sampling, starts: Sequence[Start]
    ) -> AsyncIterator[asyncio.Future[list[tuple[int, Response]]]]:
        world = self._world
        for _ in range(world.rng.randrange(4)):  # an engine hears of a request some time after it was asked for it
            await asyncio.sleep(0)
        self._known[key] = False
        made: dict[int, list[int]] = {place: [] for place in range(len(starts))}  # of what was not handed over
        running = set(made)
        while running and not self.dead:
            ended: dict[int, str] = {}
            for _ in range(TOGETHER):
                await asyncio.sleep(0)
                for place in running - ended.keys():
                    if reason := self._step(key, sampling.max_tokens, starts[place], made[place]):
                        ended[place] = reason
            running -= ended.keys()
            if ended and not self.dead:
                yield future(
                    [
                        (at, self._response(starts[at], made.pop(at), why, len(prompt) if sampling.experts else None))
                        for at, why in ended.items()
                    ]
                )
        del self._known[key]
        if self.dead:
            world.lost |= {number for numbers in made.values() for number in numbers}
            yield future(WorkerLost("killed"))

    def _step(self, key: str, cap: int, start: Start, made: list[int]) -> str:
        """Makes one token at most; returns why the response ended, "" if it has not."""
        world = self._world
        if self._known[key]:
            return "abort"
        if world.rng.random() < 0.4:
            return ""
        place = len(start.token_ids) + len(made)
        token = response_seed(start.seed, place) % 40
        assert place < cap
        made.append(len(world.log))
        world.log.append(Token(token, place, world.version, (start.seed, place)))
        return "stop" if token == STOP else "length" if place + 1 == cap else ""

    def _response(self, start: Start, made: list[int], reason: str, prompt: int | None = None) -> Response:
        """prompt: its length, if experts are asked for."""
        tokens = [self._world.log[number] for number in made]
        ids = np.array([token.token for token in tokens], dtype=np.int32)
        begins = [k for k in range(len(made)) if k == 0 or tokens[k].version != tokens[k - 1].version]
        edges = pairwise([*begins, len(made)])
        spans = [VersionSpan(version=tokens[begin].version, start=begin, end=end) for begin, end in edges]
        return Response(
            token_ids=ids,
            rollout_logprobs=-np.array(made, dtype=np.float32),
            text="" if reason == "abort" else text_of([*start.token_ids, *ids]),
            finish_reason=reason,
            policy_versions=tuple(spans),
            engine=-1,
            seconds=1.0,
            support=support_of(made),
            experts=None if prompt is None or not made else experts_of(start, prompt, len(made)),
        )


def experts_of(start: Start, prompt: int, made: int) -> Experts:
    """[tokens, 1, 2]: as if each token had gone through experts with the number of its place, and of its request."""
    known = len(start.token_ids)
    places = np.arange(prompt + known - 1 if known else 0, prompt + known + made - 1)
    return np.stack([places % 256, np.full(len(places), start.seed % 256)], axis=-1).astype(np.uint8)[:, None]


def assert_experts(found: Experts | None, prompt: int, length: int) -> None:
    """Each token but the last has its own, once."""
    if found is None:
        assert not length
        return
    assert found.dtype == np.uint8 and found[:, 0, 0].tolist() == [k % 256 for k in range(prompt + length - 1)]


def support_of(numbers: Sequence[int]) -> Support:
    """As if a token's number in the log named one to three tokens that could be sampled, and their probabilities."""
    ids = [[number + k for k in range(1 + number % 3)] for number in numbers]
    flat = np.array([one for own in ids for one in own], dtype=np.int32)
    counts = np.array([len(own) for own in ids], dtype=np.uint16)
    return Support(counts=counts, token_ids=flat, logprobs=-flat.astype(np.float32))


def assert_support(found: Support | None, numbers: Sequence[int]) -> None:
    wanted = support_of(numbers)
    if found is None:
        assert not numbers
        return
    assert found.counts.dtype == np.uint16 and found.counts.tolist() == wanted.counts.tolist()
    assert found.token_ids.dtype == np.int32 and found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.logprobs is not None and wanted.logprobs is not None
    assert found.logprobs.tolist() == wanted.logprobs.tolist()


def text_of(token_ids: Sequence[int]) -> str:
    return " ".join(str(token) for token in token_ids)


def future(result: object) -> "asyncio.Future":
    done = asyncio.get_running_loop().create_future()
    done.set_exception(result) if isinstance(result, Exception) else done.set_result(result)
    return done


class Slot(EngineSlot):
    """An engine's place with an `Engine` in it; `die` puts another one there, which serves at once."""

    def __init__(self, number: int, world: World, *, count: int, lent: bool) -> None:
        self._world = world
        super().__init__(number, {}, RolloutConfig(num_engines=count), count=count, lent=lent)
        self.size = EngineSize(sequences=SLOTS, kv_tokens=0, window=100)
        self.serving = True

    def _make(self) -> None:
        self.worker = Engine(self._world)

    def die(self) -> None:
        self.worker.dead = True
        self._make()


def played_pool(world: World, engines: int = 2, lent: int = 0) -> RolloutPool:
    """The real pool over such engines, the last ones of which are `lent` GPUs."""
    pool = RolloutPool([], RolloutConfig(num_engines=engines, timeout_s=60), lent=lent)
    pool._slots.extend(Slot(number, world, count=engines, lent=number >= engines - lent) for number in range(engines))
    pool._fleet = FleetCapacity([slot.size for slot in pool._slots])
    return pool
