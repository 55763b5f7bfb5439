"""Supervises the workers that run rollout functions: assigns calls to workers, and replaces a worker that dies or
hangs. Each call returns its next step, or raises `TurnLost`."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from dapo.config.reward import LimitsConfig
from dapo.config.sampling import RolloutFunctionConfig
from dapo.report.watchdog import Member
from dapo.turns.protocol import Failed, Generated, Queued, Step
from dapo.types import Prompt, Sampling
from workers.remote import RemoteError, wait
from workers.turns.worker import TurnWorker

GRACE_S = 10.0  # beyond the function's deadline; a worker that has not answered by then is blocked
MAX_LOST_IN_A_ROW = 5  # losses per worker, without an answer in between, that break the fleet
START_ATTEMPTS = 3  # of a replacement
PAUSE_S = 1.0  # after a failed attempt; doubles
KEY = "rollout.function.timeout_s"


class TurnLost(RuntimeError):
    """A call of a function ended without a result: the infrastructure or the function failed."""


class WorkerGone(TurnLost):
    """The worker of a call was lost. Another call there may be the cause, such as one that blocked the event loop."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Place:
    """The slot of a worker. load: its calls. ready: set when it has started."""

    index: int
    handle: Any
    ready: "asyncio.Event"
    load: int = 0


class Call:
    """One call of the function, for one response; it stays on its worker."""

    def __init__(self, fleet: "TurnFleet", place: _Place, name: str) -> None:
        self._fleet, self._place, self._handle, self._name = fleet, place, place.handle, name
        place.load += 1

    async def begin(self, prompt: Prompt, sampling: Sampling) -> Step:
        """Starts the call; returns its first step. Raises TurnLost."""
        return await self._answer(self._handle.begin.remote(self._name, prompt, sampling))

    async def resume(self, generated: Generated) -> Step:
        """Passes in the requested tokens; returns the next step. Raises TurnLost."""
        return await self._answer(self._handle.resume.remote(self._name, generated))

    def close(self, *, ended: bool) -> None:
        """Releases the call. ended: its worker knows that it has ended."""
        self._place.load -= 1
        if not ended:
            self._handle.drop.remote(self._name)

    async def _answer(self, ref: Awaitable[Step]) -> Step:
        step = await self._fleet.answer(self._place, self._handle, ref)
        while isinstance(step, Queued):
            step = await self._fleet.answer(self._place, self._handle, self._handle.go_on.remote(self._name))
        return step


class TurnFleet:
    """All workers. respawned: number of replacements."""

    def __init__(
        self,
        options: dict[str, Any],
        spec: RolloutFunctionConfig,
        *,
        limits: LimitsConfig | None = None,
        template_kwargs: dict[str, Any] | None = None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        """options: Ray options of each worker. limits: for programs of the model, if any. template_kwargs:
        `data.chat_template_kwargs`."""
        self.respawned = 0
        self._options, self._spec, self._warn = options, spec, warn
        self._limits, self._template_kwargs = limits or LimitsConfig(), template_kwargs or {}
        self._places: list[_Place] = []
        self._model: tuple[str, bool] = ("", False)
        self._digest = ""  # of the function's file
        self._start_timeout_s = 0.0
        self._lost_in_a_row = 0
        self._broken: RemoteError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, model_path: str, trust_remote_code: bool, timeout_s: float) -> str:
        """Waits until all workers have loaded function and tokenizer. Returns how programs of the model are sandboxed,
        empty if the function runs none. Raises RemoteError if a worker fails."""
        self._model, self._start_timeout_s = (model_path, trust_remote_code), timeout_s
        self._places = [
            _Place(index=index, handle=self._make(), ready=asyncio.Event()) for index in range(self._spec.num_workers)
        ]
        confined: list[str] = await asyncio.gather(*[self._start(place) for place in self._places])
        return confined[0]

    async def call(self, name: str) -> Call:
        """Returns a call on the least loaded worker. Raises RemoteError if workers end repeatedly."""
        if self._broken is not None:
            raise self._broken
        place = min(self._places, key=lambda place: (not place.ready.is_set(), place.load))
        await place.ready.wait()
        if self._broken is not None:
            raise self._broken
        return Call(self, place, name)

    async def answer(self, place: _Place, handle: Any, ref: Awaitable[Step]) -> Step:
        """Returns the next step of a call. Raises TurnLost if it failed, WorkerGone if its worker was lost."""
        try:
            [step] = await wait([ref], self._spec.timeout_s + GRACE_S, self._member(place, "to call it"), KEY)
        except RemoteError as error:
            self._lose(place, handle, str(error))
            raise WorkerGone(str(error)) from None
        self._lost_in_a_row = 0
        if isinstance(step, Failed):
            raise TurnLost(step.detail)
        found: Step = step
        return found

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for place in self._places:
            _kill(place.handle)

    def _make(self) -> Any:
        remote: Any = ray.remote(TurnWorker)
        return remote.options(max_concurrency=4096, **self._options).remote()

    def _member(self, place: _Place, act: str) -> Member:
        return Member(role="rollout function", number=place.index, count=self._spec.num_workers, act=act)

    async def _start(self, place: _Place) -> str:
        ref = place.handle.start.remote(self._spec, *self._model, self._limits, self._template_kwargs)
        [(confined, digest)] = await wait(
            [ref], self._start_timeout_s, self._member(place, "to start"), "rollout.start_timeout_s"
        )
        self._digest = self._digest or digest
        if digest != self._digest:
            raise RemoteError(
                f"`rollout.function.path` ({self._spec.path}) differs from node to node or has changed during the run; "
                "give all nodes the same file, and start a new run for a new one"
            )
        place.ready.set()
        return str(confined)

    def _lose(self, place: _Place, handle: Any, why: str) -> None:
        if place.handle is not handle:
            return
        self.respawned += 1
        self._lost_in_a_row += 1
        _kill(handle)
        place.handle, place.ready = self._make(), asyncio.Event()
        if self._lost_in_a_row > MAX_LOST_IN_A_ROW * self._spec.num_workers:
            self._break(RemoteError(f"the workers of `rollout.function` end again and again; the last: {why}"))
            return
        self._warn(f"the worker of `rollout.function` number {place.index} is replaced: {why}")
        task = asyncio.ensure_future(self._restart(place))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart(self, place: _Place) -> None:
        for left in reversed(range(START_ATTEMPTS)):
            try:
                await self._start(place)
                return
            except RemoteError as error:
                if not left:
                    self._break(error)
                    return
                self._warn(f"the worker of `rollout.function` number {place.index} did not start: {error}")
            _kill(place.handle)
            await asyncio.sleep(PAUSE_S * 2 ** (START_ATTEMPTS - 1 - left))
            place.handle = self._make()

    def _break(self, error: RemoteError) -> None:
        self._broken = self._broken or error
        for each in self._places:
            each.ready.set()


def _kill(handle: Any) -> None:
    with suppress(Exception):
        ray.kill(handle)
