"""Runs rollout functions in Ray actors. Each call returns its next step, or raises `TurnLost`; a worker that dies or
hangs is replaced."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from dapo.config.reward import LimitsConfig
from dapo.config.sampling import RolloutFunctionConfig
from dapo.ground.watchdog import Member
from dapo.sandbox import client
from dapo.turns.loading import digest_of, load, runs_programs
from dapo.turns.protocol import Ask, Failed, Generated, Queued, Step
from dapo.turns.session import Session
from dapo.types import Prompt, Sampling
from dapo.workers.remote import RemoteError, wait
from dapo.workers.supervise import Worker, Workers

GRACE_S = 10.0  # beyond the function's deadline; a worker that has not answered by then is blocked
KEY = "rollout.function.timeout_s"


class TurnWorker:
    """Keeps its unfinished calls by name; `start` must be called first."""

    async def start(
        self,
        spec: RolloutFunctionConfig,
        model_path: str,
        trust_remote_code: bool,
        limits: LimitsConfig,
        template_kwargs: dict[str, Any],
    ) -> tuple[str, str]:
        """Loads function and tokenizer, and starts the sandbox if the function runs programs of the model. Returns how
        these are sandboxed, and the digest of the function's file. Raises ValueError as `dapo.turns.loading.load` does,
        and if the sandbox cannot be set up."""
        from transformers import AutoTokenizer

        self._spec, self._function, self._template_kwargs = spec, load(spec), template_kwargs
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        self._sessions: dict[str, Session] = {}
        digest = digest_of(self._function)
        if not runs_programs(self._function, spec.kwargs):
            return "", digest
        unconfined = limits.allow_unconfined
        programs = await asyncio.to_thread(client.start, limits.sandbox, allow_unconfined=unconfined)
        return programs.way.describe(), digest

    async def begin(self, name: str, prompt: Prompt, sampling: Sampling) -> Step:
        kwargs, given = self._spec.kwargs, self._template_kwargs
        session = Session(self._function, kwargs, prompt, sampling, self._tokenizer, given)
        self._sessions[name] = session
        return self._kept(name, await session.step(self._spec.timeout_s))

    async def resume(self, name: str, generated: Generated) -> Step:
        return self._kept(name, await self._sessions[name].resume(generated, self._spec.timeout_s))

    async def go_on(self, name: str) -> Step:
        """Returns the next step of a call that returned `Queued`."""
        return self._kept(name, await self._sessions[name].step(self._spec.timeout_s))

    async def drop(self, name: str) -> None:
        if (session := self._sessions.pop(name, None)) is not None:
            session.close()

    def _kept(self, name: str, step: Step) -> Step:
        if not isinstance(step, Ask | Queued) and (session := self._sessions.pop(name, None)) is not None:
            session.close()
        return step


class TurnLost(RuntimeError):
    """A call of a function ended without a result: the infrastructure or the function failed."""


class WorkerGone(TurnLost):
    """The worker of a call was lost. Another call there may be the cause, such as one that blocked the event loop."""


class Call:
    """One call of the function, for one response; it stays on its worker."""

    def __init__(self, fleet: "TurnFleet", worker: Worker, name: str) -> None:
        self._fleet, self._worker, self._handle, self._name = fleet, worker, worker.handle, name
        worker.load += 1

    async def begin(self, prompt: Prompt, sampling: Sampling) -> Step:
        """Starts the call; returns its first step. Raises TurnLost."""
        return await self._answer(self._handle.begin.remote(self._name, prompt, sampling))

    async def resume(self, generated: Generated) -> Step:
        """Passes in the requested tokens; returns the next step. Raises TurnLost."""
        return await self._answer(self._handle.resume.remote(self._name, generated))

    def close(self, *, ended: bool) -> None:
        """Releases the call. ended: its worker knows that it has ended."""
        self._worker.load -= 1
        if not ended:
            self._handle.drop.remote(self._name)

    async def _answer(self, ref: Awaitable[Step]) -> Step:
        step = await self._fleet.answer(self._worker, self._handle, ref)
        while isinstance(step, Queued):
            step = await self._fleet.answer(self._worker, self._handle, self._handle.go_on.remote(self._name))
        return step


class TurnFleet:
    """All workers of rollout functions."""

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
        self._options, self._spec = options, spec
        self._limits, self._template_kwargs = limits or LimitsConfig(), template_kwargs or {}
        self._model: tuple[str, bool] = ("", False)
        self._digest = ""  # of the function's file
        name = "`rollout.function` worker"
        self.workers = Workers(self._make, self._start, name=name, count=spec.num_workers, warn=warn)

    async def start(self, model_path: str, trust_remote_code: bool, timeout_s: float) -> str:
        """Waits until all workers have loaded function and tokenizer. Returns how programs of the model are sandboxed,
        empty if the function runs none. Raises RemoteError if a worker fails."""
        self._model = (model_path, trust_remote_code)
        return str(await self.workers.start(timeout_s))

    async def call(self, name: str) -> Call:
        """Returns a call on the least loaded worker. Raises RemoteError if workers end repeatedly."""
        while self.workers.broken is None:
            if there := [worker for worker in self.workers.all if worker.up]:
                return Call(self, min(there, key=lambda worker: worker.load), name)
            await self.workers.changed.wait()
        raise self.workers.broken

    async def answer(self, worker: Worker, handle: Any, ref: Awaitable[Step]) -> Step:
        """Returns the next step of a call. Raises TurnLost if it failed, WorkerGone if its worker was lost."""
        try:
            [step] = await wait([ref], self._spec.timeout_s + GRACE_S, self._member(worker.index, "to call it"), KEY)
        except RemoteError as error:
            self.workers.lose(worker, handle, str(error))
            raise WorkerGone(str(error)) from None
        self.workers.answered()
        if isinstance(step, Failed):
            raise TurnLost(step.detail)
        found: Step = step
        return found

    def stop(self) -> None:
        self.workers.stop()

    def _make(self, index: int) -> Any:
        remote: Any = ray.remote(TurnWorker)
        return remote.options(max_concurrency=4096, **self._options).remote()

    def _member(self, index: int, act: str) -> Member:
        return Member(role="rollout function", number=index, count=self._spec.num_workers, act=act)

    async def _start(self, handle: Any, index: int, timeout_s: float) -> str:
        ref = handle.start.remote(self._spec, *self._model, self._limits, self._template_kwargs)
        [(confined, digest)] = await wait([ref], timeout_s, self._member(index, "to start"), "rollout.start_timeout_s")
        self._digest = self._digest or digest
        if digest != self._digest:
            raise RemoteError(
                f"`rollout.function.path` ({self._spec.path}) differs from node to node or has changed during the run; "
                "give all nodes the same file, and start a new run for a new one"
            )
        return str(confined)
