"""Starts one judge server, which is vLLM's, and tells whether it is lost. Needs no Ray."""

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

PROGRAM = ("-m", "dapo.workers.judging.process")
NAME = "judge"  # of the model at the endpoint
LOOK_S = 0.2  # between two checks of the process
PROBE_S = 5.0  # between two probes, which are requests for one token
FAILURES = 2  # failed probes in a row after which the server is lost; one timeout is enough
KEPT_BYTES = 100_000  # last output bytes kept, to find the reason of a failure; more than a pipe holds
_REASON = re.compile(r"^(?:\(.*?pid=\d+\)\s*)?((?:[\w.]*(?:Error|Exception)\b|vllm: error):.*)$", re.MULTILINE)


class Server:
    """The server process. url: includes the API version."""

    def __init__(self, arguments: Sequence[str], host: str, *, silence_s: float) -> None:
        """arguments: of vLLM's server. silence_s: longest time for one token."""
        self.key = secrets.token_hex(32)
        self._arguments, self._host, self._port = list(arguments), host, _free_port(host)
        self._silence_s, self._lost = silence_s, ""
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.AsyncClient(timeout=silence_s, trust_env=False, verify=False)  # without TLS
        self._output: _Output | None = None

    @property
    def url(self) -> str:
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}/v1"

    @property
    def pid(self) -> int:
        """The process id, which is also its process group; 0 if none runs."""
        return 0 if self._process is None else self._process.pid

    async def start(self, timeout_s: float) -> None:
        """Starts the process and waits until it has answered a request. Raises RuntimeError with the reason if it does
        not."""
        self._process = subprocess.Popen(
            [
                *(sys.executable, *PROGRAM, *self._arguments, "--served-model-name", NAME),
                *("--host", self._host, "--port", str(self._port)),
                *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
            ],
            stdin=subprocess.PIPE,  # closes when this process ends, which ends the server
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

    async def check(self, *, now: bool) -> None:
        """Returns when the server has answered a probe, made at once (`now`) or after `PROBE_S`. Kills it and raises
        RuntimeError as soon as it is lost: it has ended, hangs, or has lost its engine."""
        probing = asyncio.create_task(self._until_answer(0.0 if now else PROBE_S))
        try:
            while not (ended := self._ended()) and not probing.done():
                await asyncio.wait({probing}, timeout=LOOK_S)
            self._lost = ended or probing.result()
        finally:
            probing.cancel()
        if self._lost:
            self.kill()
            raise RuntimeError(self._lost)

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stdin is not None and self._output is not None
            self._process.stdin.close()
            self._output.close()
            self._process = None

    async def _until_up(self) -> None:
        """Returns when it has answered. Raises RuntimeError if it ends, or rejects the probe with a 4xx status."""
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

    async def _until_answer(self, pause_s: float) -> str:
        """Returns "" once a probe is answered, or how probes fail."""
        for _ in range(FAILURES):
            await asyncio.sleep(pause_s)
            try:
                answer = await self._probe()
            except httpx.TimeoutException:
                return f"it gave no token within {self._silence_s:g} s (`reward.judge.engine.silence_s`)"
            if answer == 200:
                return ""
            pause_s = PROBE_S
        return f"it answered {answer}" if answer else "it takes no connection"

    async def _probe(self) -> int:
        """Returns the HTTP status of a request for one token; 0 if the connection is refused or dropped."""
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
        """Returns how the process ended, or why it was lost; "" while it lives."""
        if self._lost:
            return self._lost
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
    """Keeps the last bytes of a process's output in memory: bounded, and the process never blocks on a full pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._kept, self._loop = pipe, b"", asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    def end(self) -> str:
        """Returns the output kept so far. Reads the pipe first: it may still hold the last output of an ended
        process."""
        self._read()
        return self._kept.decode("utf-8", "replace")

    def close(self) -> None:
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
    """Returns the server's environment: without Ray's variables, and with this process's import path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, "PYTHONPATH": path, "VLLM_API_KEY": key}
