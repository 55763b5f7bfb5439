"""Runs self-hosted judges, each a vLLM server in a Ray actor. Reward workers call them over HTTP. A server that ends or
hangs is restarted by its actor; an actor that is lost with its node is replaced."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import ray

from dapo.config.paths import resolve_path
from dapo.config.reward import JudgeEngineConfig
from dapo.faults.restarts import Restarts
from dapo.report.watchdog import Member, waiting
from workers.judging.server import Server
from workers.remote import RemoteError, wait

POLL_S, GRACE_S = 5.0, 120.0  # an actor reports changes at once, and at least every POLL_S
KEY, START_KEY = "reward.judge.engine", "rollout.start_timeout_s"


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """State of a server; fields as in `workers.judging.server.Server`. Made by `JudgeWorker`."""

    url: str
    key: str
    up: bool
    answered: int
    restarts: int
    failure: str


class JudgeWorker:
    """Runs one server; call `start` first (not a constructor, because Ray hides a constructor's error)."""

    async def start(self, arguments: Sequence[str], config: JudgeEngineConfig, timeout_s: float) -> State:
        """Waits until the server answers; it is supervised from then on. Raises RuntimeError with the reason."""
        host = ray.util.get_node_ip_address()
        self._server = Server(arguments, host, silence_s=config.silence_s, max_restarts=config.max_restarts)
        await self._server.start(timeout_s)
        self._task = asyncio.create_task(self._server.keep(timeout_s))
        return self._state()

    async def next_state(self) -> State:
        """Returns the state when it changes, after `POLL_S` at the latest. Raises RuntimeError if the supervision
        failed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._server.changed.wait(), POLL_S)
        self._server.changed.clear()
        if self._task.done() and (error := self._task.exception()) is not None:
            raise RuntimeError(f"its server is kept up no more: {type(error).__name__}: {error}")
        return self._state()

    def _state(self) -> State:
        server = self._server
        return State(**{field.name: getattr(server, field.name) for field in fields(State)})


@dataclass(kw_only=True, slots=True, eq=False)
class _Place:
    """The slot of a judge actor. before: restarts of earlier actors in this slot, and their replacements. given_up: it
    is not replaced any more."""

    index: int
    handle: Any
    limit: Restarts
    state: State | None = None
    before: int = 0
    given_up: bool = False


class JudgePool:
    """All judges. failure: why no judge is left, or ""."""

    def __init__(
        self,
        config: JudgeEngineConfig,
        options: Sequence[dict[str, Any]],
        *,
        device: str,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Creates the actors. options: Ray options of each. options and device, `cpu` or `cuda`, are from
        `workers.placement`."""
        self.failure = ""
        self._config, self._options, self._warn = config, options, warn
        self._arguments = server_arguments(config, device)
        self._timeout_s = 0.0
        self._places = [
            _Place(index=index, handle=self._make(index), limit=Restarts(config.max_restarts))
            for index in range(len(options))
        ]
        self._watches: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()  # set and replaced at each change

    @property
    def restarts(self) -> int:
        return sum(place.before + (place.state.restarts if place.state else 0) for place in self._places)

    def servers(self) -> list[dict[str, str]]:
        """Returns `url`, `key` and start number of each serving judge."""
        return [
            {"url": place.state.url, "key": place.state.key, "start": str(place.before + place.state.restarts)}
            for place in self._places
            if place.state is not None and place.state.up
        ]

    async def there(self) -> list[dict[str, str]]:
        """Waits until a judge serves and returns `servers`; empty if none ever will."""
        if not self.servers() and not self.failure:
            with waiting("a judge to serve", each="responses"):
                while not self.servers() and not self.failure:
                    await self._news.wait()
        return self.servers()

    async def heard(self) -> None:
        """Waits until each serving judge has answered a new probe, or is lost. A hanging judge is detected within
        `silence_s`."""

        def shown(place: _Place) -> tuple[int, ...]:
            now = place.state
            return () if now is None or not now.up else (place.before, now.restarts, now.answered)

        before = [shown(place) for place in self._places]
        with waiting("judges to answer a request for one token", each="responses"):
            while any(then and then == shown(place) for place, then in zip(self._places, before, strict=True)):
                await self._news.wait()

    async def start(self, timeout_s: float) -> None:
        """Waits until all serve. timeout_s: also for each later start. Raises RemoteError."""
        self._timeout_s = timeout_s
        await asyncio.gather(*[self._start(place) for place in self._places])
        self._watches = [asyncio.create_task(self._watch(place)) for place in self._places]

    def stop(self) -> None:
        """Kills all actors with their servers; pending calls of `there` return an empty list."""
        self.failure = self.failure or "the judges are stopped"
        self._tell()
        for watch in self._watches:
            watch.cancel()
        for place in self._places:
            ray.kill(place.handle)

    def _make(self, index: int) -> Any:
        worker: Any = ray.remote(JudgeWorker)
        return worker.options(**self._options[index]).remote()

    def _note(self, place: _Place, state: State | None) -> None:
        place.state = state
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _member(self, place: _Place, act: str) -> Member:
        return Member(role="judge", number=place.index, count=len(self._places), act=act)

    async def _start(self, place: _Place) -> None:
        ref = place.handle.start.remote(self._arguments, self._config, self._timeout_s)
        member = self._member(place, f"to load `{KEY}.path` ({self._config.path}) and answer")
        [state] = await wait([ref], self._timeout_s + GRACE_S, member, START_KEY)
        self._note(place, state)

    async def _watch(self, place: _Place) -> None:
        while place.state is None or not place.state.failure:
            try:
                await self._follow(place)
            except RemoteError as error:
                if reason := await self._replace(place, str(error)):
                    return self._give_up(place, reason)
        self._give_up(place, place.state.failure)

    async def _follow(self, place: _Place) -> None:
        before = place.state
        member = self._member(place, "to tell how it does")
        [now] = await wait([place.handle.next_state.remote()], POLL_S + GRACE_S, member, "")
        self._note(place, now)
        if before is not None and now.restarts > before.restarts:
            self._warn(f"judge {place.index} is lost, and its server is started again (restart {now.restarts})")

    async def _replace(self, place: _Place, why: str) -> str:
        """Returns "" once another actor serves in this slot, or the reason if the restart limit is reached. why: reason
        of the loss."""
        place.before += place.state.restarts if place.state else 0
        self._note(place, None)
        while not place.limit.spent():
            self._warn(f"judge {place.index} is replaced: {why}")
            place.limit.add()
            place.before += 1
            with suppress(Exception):
                ray.kill(place.handle)
            place.handle = self._make(place.index)
            try:
                await self._start(place)
            except RemoteError as error:
                why = str(error)
                continue
            place.limit.worked()
            return ""
        return why

    def _give_up(self, place: _Place, why: str) -> None:
        self._warn(f"judge {place.index} is given up: {why}")
        self._note(place, None)
        place.given_up = True
        if all(each.given_up for each in self._places):
            self.failure = f"no judge is left (`{KEY}`); the last one, {place.index}: {why}"


def server_arguments(config: JudgeEngineConfig, device: str) -> list[str]:
    """Returns the arguments of vLLM's server. `reward.judge.engine.vllm` overrides those of a CPU engine."""
    given: Mapping[str, Any] = config.vllm
    own: dict[str, Any] = {"load_format": "safetensors", "trust_remote_code": config.trust_remote_code}
    if device == "cpu":
        own |= {"dtype": "float32", "enforce_eager": True}
    found = ["--model", resolve_path(config.path)]
    for name, value in {**own, **given}.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            found += [f"--{flag}", *map(str, value)]
        elif value is not None:
            found.append(f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return found
