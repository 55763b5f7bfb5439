"""Keeps one server of a judge up: starts it, asks it now and then, and starts it again where it is lost.

In: arguments of vLLM's server. Out: its address and key, and how often it was started again. It needs no Ray.
"""

import asyncio
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

import httpx

from dapo.faults.restarts import Restarts

PROGRAM = ("-m", "workers.judging.process")
NAME = "judge"  # of the model at the endpoint
LOOK_S = 0.2  # between two looks at the process
PROBE_S = 5.0  # between two requests for one token
FAILURES = 2  # requests in a row that fail at once: then the server is lost
KEPT_BYTES = 100_000  # of the end of its output, for the reason in it; more than a pipe holds
_REASON = re.compile(r"^(?:\(.*?pid=\d+\)\s*)?((?:[\w.]*(?:Error|Exception)\b|vllm: error):.*)$", re.MULTILINE)


class Server:
    """Holds the process. url: with the API's version; it stays the same as long as its port is free. up: whether it
    answers. answered: requests for one token since it was up. restarts: of its process. failure: why it is given up, ""
    before."""

    def __init__(self, arguments: Sequence[str], host: str, *, silence_s: float, max_restarts: int) -> None:
        """Starts nothing. arguments: of vLLM's server. silence_s: longest time for one token."""
        self.key = secrets.token_hex(32)
        self.up, self.answered, self.restarts, self.failure = False, 0, 0, ""
        self.changed = asyncio.Event()
        self._arguments, self._host, self._port = list(arguments), host, 0
        self._silence_s, self._limit = silence_s, Restarts(max_restarts)
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.AsyncClient(timeout=silence_s, trust_env=False, verify=False)  # without TLS
        self._output: _Output | None = None

    @property
    def url(self) -> str:
        """Returns the address."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}/v1"

    @property
    def pid(self) -> int:
        """Returns the number of the process, which leads a group of its own; 0 where none runs."""
        return 0 if self._process is None else self._process.pid

    async def start(self, timeout_s: float) -> None:
        """Starts the process and waits until it has answered a request. Raises RuntimeError, with the reason."""
        if not self._port:
            self._port = _free_port(self._host)
        self._process = subprocess.Popen(
            [
                *(sys.executable, *PROGRAM, *self._arguments, "--served-model-name", NAME),
                *("--host", self._host, "--port", str(self._port)),
                *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
            ],
            stdin=subprocess.PIPE,  # its end tells the process that this one has gone
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(self.key),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = _Output(self._process.stdout)
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_up()
        except TimeoutError:
            self.kill()
            raise RuntimeError(f"it did not answer within {timeout_s:g} s") from None
        except BaseException:
            self.kill()
            raise
        self.up = True
        self.changed.set()

    async def keep(self, timeout_s: float) -> None:
        """Starts it again whenever it is lost; returns when it is given up. timeout_s: for one start."""
        while True:
            reason = await self._until_lost()
            self.up = False
            self.kill()
            while not self.up:
                if self._limit.spent():
                    self.failure = f"it was started again {self._limit.count()} times in an hour or in a row; {reason}"
                    self.changed.set()
                    return
                self._limit.add()
                self.restarts += 1
                self.changed.set()
                try:
                    await self.start(timeout_s)
                except (RuntimeError, OSError) as error:
                    reason, self._port = str(error), 0  # another process may have taken the port
            self._limit.worked()

    def kill(self) -> None:
        """Ends the process and all that it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stdin is not None and self._output is not None
            self._process.stdin.close()
            self._output.close()
            self._process = None

    async def _until_up(self) -> None:
        """Returns when it has answered. Raises RuntimeError where it ends, or refuses what it will always refuse."""
        while not (ended := self._ended()):
            answer = 0
            with suppress(httpx.TimeoutException):  # the first answer may take a compilation
                answer = await self._probe()
            if answer == 200:
                return
            if 400 <= answer < 500:
                raise RuntimeError(f"it refuses a plain conversation (status {answer}): {self._reason()}")
            await asyncio.sleep(LOOK_S)
        raise RuntimeError(ended)

    async def _until_lost(self) -> str:
        """Returns why it is lost, as soon as it is."""
        probing = asyncio.create_task(self._until_silent())
        try:
            while not (ended := self._ended()) and not probing.done():
                await asyncio.wait({probing}, timeout=LOOK_S)
            return ended or probing.result()
        finally:
            probing.cancel()

    async def _until_silent(self) -> str:
        """Returns in which way it stopped answering. Its process may live: nothing else tells of one that stands still
        or has lost its engine."""
        failures = 0
        while failures < FAILURES:
            await asyncio.sleep(PROBE_S)
            try:
                answer = await self._probe()
            except httpx.TimeoutException:
                return f"it gave no token within {self._silence_s:g} s (`reward.judge.engine.silence_s`)"
            failures = 0 if answer == 200 else failures + 1
            self.answered += answer == 200
        return f"it answered {answer}" if answer else "it takes no connection"

    async def _probe(self) -> int:
        """Returns the status of a request for one token, 0 where it takes no connection or drops it."""
        try:
            answer = await self._client.post(
                f"{self.url}/chat/completions",
                headers={"Authorization": f"Bearer {self.key}"},
                json={"model": NAME, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1},
            )
        except (httpx.NetworkError, httpx.ProtocolError):
            return 0
        return answer.status_code

    def _ended(self) -> str:
        """Says how the process ended; "" while it lives."""
        assert self._process is not None
        status = self._process.poll()
        return "" if status is None else f"its process ended (exit status {status}): {self._reason()}"

    def _reason(self) -> str:
        """Returns the last error in its output, else its last line."""
        assert self._output is not None
        text = self._output.end()
        found = _REASON.findall(text) or [line for line in text.splitlines() if line.strip()] or ["it wrote nothing"]
        return str(found[-1])[:300]


class _Output:
    """Keeps the end of what a process writes, in memory: nothing grows, and the process never waits for a reader."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._kept, self._loop = pipe, b"", asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    def end(self) -> str:
        """Returns it as it is now: what a process has written that has just ended is in the pipe yet."""
        self._read()
        return self._kept.decode("utf-8", "replace")

    def close(self) -> None:
        """Reads no more."""
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()

    def _read(self) -> None:
        try:
            part = os.read(self._pipe.fileno(), KEPT_BYTES)
        except BlockingIOError:
            return
        if not part:
            self._loop.remove_reader(self._pipe.fileno())
        self._kept = (self._kept + part)[-KEPT_BYTES:]


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


def _environment(key: str) -> dict[str, str]:
    """Returns the environment of the server: without Ray's token, and with the packages that this process finds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, "PYTHONPATH": path, "VLLM_API_KEY": key}
