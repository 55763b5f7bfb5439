"""`dapo serve HOST:PORT`: an engine outside of the Ray cluster of a run. It connects to the run's driver, takes weights
from the store, and answers until it is told to end (`workers.engines.outside` is the driver's end)."""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import yaml

from dapo.config.paths import checked_path
from dapo.ground.console import say, warn
from dapo.workers.capacity import EngineSize
from dapo.workers.engines import stream
from dapo.workers.engines.outside import SENT, fingerprint
from dapo.workers.engines.stream import Frames, Refused
from dapo.workers.engines.worker import RolloutWorker
from dapo.workers.placement import vllm_environment
from dapo.workers.remote import WorkerLost
from dapo.workers.weights.bucket import Bucket
from dapo.workers.weights.store import fetch, make_from_model, path_of

PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0  # between two attempts to connect
ON_DEVICE: dict[str, dict[str, Any]] = {"cuda": {}, "cpu": {"distributed_executor_backend": "uni"}}
# Fields of `BucketInitInfo` that only other transports use.
FILES = {
    **{"transport": "files", "capacity": 0, "address": "", "port": 0, "group_size": 0, "first_rank": 0},
    **{"timeout_s": 0.0, "memory": {}},
}


class OutsideEngine:
    """One engine, which lives on when its connection is lost. ended: the process must end, and why."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        """folder: for fetched buckets."""
        self._given, self._folder = given, folder
        host, _, port = given.address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._tls, self._token = stream.client_context(given.ca), stream.read_token(given.token)
        self._engine: RolloutWorker | None = None
        self._starting: asyncio.Task[EngineSize] | None = None
        self._arguments: dict[str, Any] = {}
        self._takes_files = False
        self._fetched_bytes, self._fetch_s = 0, 0.0  # since the last version
        self._frames: Frames | None = None
        self._leaves = asyncio.Event()
        self._failure = ""

    def leave(self) -> None:
        self._leaves.set()

    async def run(self) -> None:
        """Serves until `leave`. Raises RuntimeError if the engine fails, or no driver is there for `--patience`."""
        told = asyncio.create_task(self._leaves.wait())
        try:
            while not told.done() and not self._failure:
                serving = asyncio.create_task(self._connected())
                await asyncio.wait({told, serving}, return_when=asyncio.FIRST_COMPLETED)
                if told.done() and not serving.done():
                    await self._hand_over(serving)
                await serving
                await asyncio.sleep(PAUSE_S)
        finally:
            told.cancel()
            if self._engine is not None and self._starting is not None and self._starting.done():
                await self._engine.stop()
        if self._failure:
            raise RuntimeError(self._failure)

    async def _hand_over(self, serving: "asyncio.Task[None]") -> None:
        """Tells the driver, which closes the connection when it has what there is."""
        if self._frames is not None and self._starting is not None and self._starting.done():
            say(f"ends within {self._given.notice:g} s")
            with suppress(OSError):
                await self._frames.send(stream.Leaving(0))
            await asyncio.wait([serving], timeout=self._given.notice)
        serving.cancel()
        await asyncio.wait([serving])

    async def _connected(self) -> None:
        """Serves one connection to its end."""
        with suppress(asyncio.CancelledError):
            self._frames = await self._reach()
            say(f"connected to {self._given.address}")
            calls: set[asyncio.Task[None]] = set()
            try:
                while not self._failure:
                    call = asyncio.create_task(
                        self._answer(self._frames, stream.to_engine(await self._frames.receive()))
                    )
                    calls.add(call)
                    call.add_done_callback(calls.discard)
            except (OSError, EOFError):
                say(f"the connection to {self._given.address} is closed")
            finally:
                self._frames.close()
                self._frames = None
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)

    async def _reach(self) -> Frames:
        until, pause, told = time.monotonic() + self._given.patience, PAUSE_S, ""
        while True:
            try:
                return await stream.connect(*self._address, self._tls, self._token)
            except (OSError, EOFError, TimeoutError, Refused) as error:
                reason = f"{type(error).__name__}: {error}"
            if time.monotonic() > until:
                raise RuntimeError(f"no run at {self._given.address} for {self._given.patience:g} s: {reason}")
            if reason != told:
                warn(f"{self._given.address} cannot be reached, and is tried again: {reason}")
            told = reason
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _answer(self, frames: Frames, asked: Any) -> None:
        answer: stream.Answer | stream.Failed
        try:
            answer = stream.Answer(asked.call, msgspec.Raw(stream.encode(await self._do(frames, asked))))
        except Exception as error:
            if isinstance(error, WorkerLost):
                self._failure = str(error)
            answer = stream.Failed(asked.call, f"{type(error).__name__}: {error}"[:2000])
        with suppress(OSError):  # of the connection, which its reader notices
            await frames.send(answer)

    async def _do(self, frames: Frames, asked: Any) -> Any:
        if isinstance(asked, stream.Begin):
            return await self._begin(asked)
        engine = self._engine
        if engine is None or self._starting is None or not self._starting.done():
            raise RuntimeError("the engine has not started yet")
        match asked:
            case stream.Beat():
                return await engine.pulse()
            case stream.Generate():
                async for batch in engine.generate(asked.key, asked.prompt, asked.sampling, asked.starts):
                    for number, response in batch:  # the driver makes the text of the tokens
                        await frames.send(stream.Part(asked.call, number, replace(response, text="")))
            case stream.Abort():
                await engine.abort(asked.keys)
            case stream.Fetch():
                await self._fetch(asked.bucket)
            case stream.Load():
                await self._load(engine, asked)
        return None

    async def _begin(self, asked: stream.Begin) -> EngineSize:
        try:
            plain = {name for name, value in asked.arguments.items() if isinstance(value, bool | int | str | None)}
            if unknown := sorted(asked.arguments.keys() - (plain & {*SENT})):
                raise ValueError(f"the run sends engine arguments that are not taken: {', '.join(unknown)}")
            own = await asyncio.to_thread(fingerprint, self._given.model)
            if other := [name for name, value in asked.model.items() if own.get(name) != value]:
                raise ValueError(
                    f"--model ({self._given.model}) differs from the run's `model.path`: {', '.join(other)}"
                )
            if self._starting is None:
                self._engine, self._arguments = RolloutWorker(), asked.arguments
                own_choice = {"load_format": "safetensors"} | ON_DEVICE[self._given.device] | self._given.arguments
                start = self._engine.start(self._given.model, asked.arguments | own_choice)
                self._starting = asyncio.create_task(start)
            if self._arguments != asked.arguments:
                raise ValueError("the run asks for other engine arguments than before; start this engine again")
            return await asyncio.shield(self._starting)  # which a lost connection does not end
        except Exception as error:
            self._failure = str(error)
            raise

    async def _fetch(self, bucket: Bucket) -> None:
        path = path_of(bucket, self._folder)
        if not self._takes_files and not path.exists():  # nothing was loaded yet: the run may be at its beginning
            await asyncio.to_thread(make_from_model, self._given.model, bucket, self._folder)
        began, there = time.monotonic(), path.exists()
        await asyncio.to_thread(fetch, self._given.store, bucket, self._folder)
        if not there:
            self._fetched_bytes += bucket.plan.num_bytes
            self._fetch_s += time.monotonic() - began

    async def _load(self, engine: RolloutWorker, asked: stream.Load) -> None:
        if not self._takes_files:
            await engine.connect_weights(FILES)
            self._takes_files = True
        try:
            await engine.start_update(asked.keep)
            for bucket in asked.buckets:
                await engine.load_bucket(replace(bucket, file=str(path_of(bucket, self._folder))))
            await engine.finish_update(asked.version)
        except Exception:
            self._takes_files = False
            await engine.leave_weights()
            raise
        for file in {*self._folder.iterdir()} - {self._folder / bucket.file for bucket in asked.buckets}:
            file.unlink(missing_ok=True)
        whole = sum(bucket.plan.num_bytes for bucket in asked.buckets)
        fetched = f"{self._fetched_bytes:,} of {whole:,} bytes fetched in {self._fetch_s:.1f} s"
        say(f"has version {asked.version}, {fetched}")
        self._fetched_bytes, self._fetch_s = 0, 0.0


def address(word: str) -> str:
    host, _, port = word.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} must be HOST:PORT")
    return word


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="dapo serve", description="An engine outside of the Ray cluster of a run.")
    made.add_argument("address", type=address, metavar="HOST:PORT", help="the run's `rollout.outside.listen`")
    made.add_argument("--model", required=True, help="a copy of the run's `model.path`")
    made.add_argument("--token", required=True, metavar="FILE", help="a copy of the run's `rollout.outside.token_file`")
    made.add_argument("--ca", required=True, metavar="FILE", help="authority of the run's certificate")
    made.add_argument("--store", required=True, metavar="URL", help="the run's `weight_sync.store`, as seen from here")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument("--threads", type=int, default=1, help="of an engine on a CPU")
    made.add_argument("--patience", type=float, default=600.0, metavar="S", help="longest time without a run (600)")
    made.add_argument("--notice", type=float, default=60.0, metavar="S", help="longest end after SIGTERM (60)")
    made.add_argument("arguments", nargs="*", metavar="KEY=VALUE", help="engine arguments of this site, as vLLM's")
    return made


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser()
    given = made.parse_intermixed_args(words)
    try:
        given.model = checked_path(given.model, key="--model")
        pairs = [word.split("=", 1) for word in given.arguments]
        given.arguments = {name: yaml.safe_load(value) for name, value in pairs}
    except ValueError as error:
        made.error(f"{error}; engine arguments are KEY=VALUE")
    return given


async def serve(given: argparse.Namespace) -> None:
    for name, value in vllm_environment(given.device, given.threads).items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="dapo-weights-") as folder:
        engine = OutsideEngine(given, Path(folder))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, engine.leave)
        await engine.run()


def main(words: Sequence[str] | None = None) -> None:
    try:
        asyncio.run(serve(parse(words)))
    except (RuntimeError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
