"""Runs self-hosted judges, each a vLLM server beside a Ray actor. Reward workers call them over HTTP. A judge whose
server ends or hangs, or whose actor is lost, is replaced."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from dapo.config.paths import resolve_path
from dapo.config.reward import JudgeEngineConfig
from dapo.ground.restarts import Restarts
from dapo.ground.watchdog import Member, waiting
from dapo.workers.judging.server import FAILURES, PROBE_S, Server
from dapo.workers.remote import RemoteError, wait
from dapo.workers.supervise import Worker, Workers, keep_up

GRACE_S = 120.0
KEY, START_KEY = "reward.judge.engine", "rollout.start_timeout_s"


class JudgeWorker:
    """Runs one server; call `start` first (not a constructor, because Ray hides a constructor's error)."""

    async def start(self, arguments: Sequence[str], config: JudgeEngineConfig, timeout_s: float) -> dict[str, str]:
        """Waits until the server answers; returns its `url` and `key`. Raises RuntimeError with the reason."""
        self._server = Server(arguments, ray.util.get_node_ip_address(), silence_s=config.silence_s)
        await self._server.start(timeout_s)
        return {"url": self._server.url, "key": self._server.key}

    async def check(self, *, now: bool) -> None:
        """See `Server.check`."""
        await self._server.check(now=now)


class JudgePool:
    """All judges."""

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
        self._config, self._options, self._warn = config, options, warn
        self._arguments = server_arguments(config, device)
        self._workers = Workers(self._make, self._start, name="judge", count=len(options), warn=warn)
        self._given_up: set[int] = set()

    @property
    def failure(self) -> str:
        """Why no judge is left, or ""."""
        return str(self._workers.broken or "")

    @property
    def restarts(self) -> int:
        return self._workers.restarts

    def servers(self) -> list[dict[str, str]]:
        """Returns `url`, `key` and start number of each serving judge."""
        return [{**judge.about, "start": str(judge.restarts)} for judge in self._workers.all if judge.up]

    async def there(self) -> list[dict[str, str]]:
        """Waits until a judge serves and returns `servers`; empty if none ever will."""
        if not self.servers() and not self.failure:
            with waiting("a judge to serve", each="responses"):
                while not self.servers() and not self.failure:
                    await self._workers.changed.wait()
        return self.servers()

    async def heard(self) -> None:
        """Waits until each serving judge has answered a new probe, or is lost. A hanging judge is detected within
        `silence_s`."""
        with waiting("judges to answer a request for one token", each="responses"):
            await asyncio.gather(*[self._lost(judge, now=True) for judge in self._workers.all if judge.up])

    async def start(self, timeout_s: float) -> None:
        """Waits until all serve. timeout_s: also for each later start. Raises RemoteError."""
        await self._workers.start(timeout_s)
        for judge in self._workers.all:
            self._workers.spawn(self._watch(judge))

    def stop(self) -> None:
        """Kills all actors with their servers; pending calls of `there` return an empty list."""
        self._workers.stop()

    def _make(self, index: int) -> Any:
        worker: Any = ray.remote(JudgeWorker)
        return worker.options(**self._options[index]).remote()

    async def _start(self, handle: Any, index: int, timeout_s: float) -> dict[str, str]:
        ref = handle.start.remote(self._arguments, self._config, timeout_s)
        member = self._member(index, f"to load `{KEY}.path` ({self._config.path}) and answer")
        [about] = await wait([ref], timeout_s + GRACE_S, member, START_KEY)
        return dict(about)

    def _member(self, index: int, act: str) -> Member:
        return Member(role="judge", number=index, count=len(self._options), act=act)

    async def _watch(self, judge: Worker) -> None:
        async def until_lost() -> str:
            while not (why := await self._lost(judge, now=False)):
                pass
            return why

        async def restart() -> None:
            await self._workers.restart(judge)

        limit = Restarts(self._config.max_restarts)
        why = await keep_up(f"judge {judge.index}", limit, until_lost, restart, self._warn)
        self._give_up(judge, f"it was started again {limit.count()} times in an hour or in a row; {why}")

    async def _lost(self, judge: Worker, *, now: bool) -> str:
        """Returns why the judge is lost, or "" once it has answered a probe."""
        handle, longest_s = judge.handle, FAILURES * (PROBE_S + self._config.silence_s)
        try:
            await wait([handle.check.remote(now=now)], longest_s + GRACE_S, self._member(judge.index, "to answer"), "")
        except RemoteError as error:
            if judge.handle is handle and judge.up:
                judge.up = False
                self._workers.notify()
            return str(error)
        return ""

    def _give_up(self, judge: Worker, why: str) -> None:
        self._warn(f"judge {judge.index} is given up: {why}")
        self._given_up.add(judge.index)
        if len(self._given_up) == len(self._options):
            self._workers.fail(f"no judge is left (`{KEY}`); the last one, {judge.index}: {why}")


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
