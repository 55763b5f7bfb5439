"""The driver's end of an engine outside of its Ray cluster: a Ray actor on the driver's node, in whose place the engine
computes (`workers.engines.serve` is the other end, `workers.engines.stream` what passes between them).

It has the methods of `workers.engines.worker.RolloutWorker` that the driver calls. It is a process of its own, so that
no byte from elsewhere reaches the driver: what the engine sends is decoded and checked here.
"""

import asyncio
import hashlib
import json
import math
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from dataclasses import astuple, replace
from itertools import count
from typing import Any, TypeVar

import msgspec
import numpy as np

from dapo.config.actor import ModelConfig
from dapo.config.facts.model_shape import read_config, text_part
from dapo.config.sampling import OutsideConfig
from dapo.data.tokenizer import load_tokenizer
from dapo.types import LEAST_LOGPROB, Int32Array, Response, Sampling
from dapo.workers.capacity import EngineSize
from dapo.workers.engines import stream
from dapo.workers.engines.life import Pulse
from dapo.workers.engines.stream import Frames, Refused
from dapo.workers.engines.worker import Start
from dapo.workers.remote import WorkerLost
from dapo.workers.weights.bucket import Bucket

T = TypeVar("T")
PAUSE_S = 0.5
MAX_KNOCKING = 16  # connections that have not proved to know the token
# Arguments of vLLM that the driver sends. The others are of the site (GPUs, memory), or may name code to be loaded.
SENT = (
    *("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_logprobs", "seed", "quantization"),
    *("enforce_eager", "enable_chunked_prefill", "enable_prefix_caching"),
)


class Deviant(ValueError):
    """An engine sent values that cannot be what it was asked for."""


class OutsideWorker:
    """Listens until one engine has come, and then speaks for it. All such actors of a run share the port: the kernel
    gives each connection to one that listens."""

    def __init__(self, cfg: OutsideConfig) -> None:
        self._cfg = cfg
        self._tls, self._token = stream.secrets_of(cfg)
        self._listener: socket.socket | None = None
        self._frames: Frames | None = None
        self._here = asyncio.Event()
        self._knocking: set[asyncio.Task[None]] = set()
        self._refused: deque[str] = deque(maxlen=4)
        self._calls: dict[int, asyncio.Queue[Any]] = {}  # what came for each, at most as much as it can have
        self._numbers = count()
        self._lost, self._leaves = "", False
        self._versions = [0]  # that the engine has served

    async def connected(self, timeout_s: float) -> tuple[bool, list[str]]:
        """Waits for an engine, at most `timeout_s`. Returns whether one is there, and who was refused since."""
        if self._listener is None:
            host, _, port = self._cfg.listen.rpartition(":")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host.strip("[]"), int(port)), family=family, reuse_port=True)
            self._listener.setblocking(False)
            self._accepting = asyncio.create_task(self._accept(self._listener))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._here.wait(), timeout_s)
        refused = [*self._refused]
        self._refused.clear()
        return self._here.is_set(), refused

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                there, (who, *_) = await loop.sock_accept(listener)
            except OSError:  # too many open files, or it was closed before it was accepted
                await asyncio.sleep(PAUSE_S)
                continue
            if len(self._knocking) >= MAX_KNOCKING:
                self._refused.append(f"{who}: too many connect at a time")
                there.close()
                continue
            knocking = asyncio.create_task(self._knock(there, who))
            self._knocking.add(knocking)
            knocking.add_done_callback(self._knocking.discard)

    async def _knock(self, there: socket.socket, who: str) -> None:
        reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(stream.HELLO_S):
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, there, ssl=self._tls)
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                frames = await stream.let_in(reader, writer, self._token)
            if self._here.is_set():
                raise Refused("another engine was faster; it may come again")
        except Exception as error:  # whatever comes from there
            self._refused.append(f"{who}: {type(error).__name__}: {error}")
            if transport is None:
                there.close()
            else:
                transport.abort()
            return
        self._accepting.cancel()
        assert self._listener is not None
        self._listener.close()  # others go to actors that still listen
        self._frames = frames
        self._here.set()
        self._reading = asyncio.create_task(self._read(frames))

    async def _read(self, frames: Frames) -> None:
        try:
            while True:
                message = stream.to_driver(await frames.receive())
                if isinstance(message, stream.Leaving):
                    self._leaves = True
                elif (messages := self._calls.get(message.call)) is not None:
                    messages.put_nowait(message)
        except asyncio.QueueFull:
            self._lose("it sent more than it was asked for")
        except (OSError, EOFError):
            self._lose("its connection was lost")
        except (Refused, msgspec.ValidationError, msgspec.DecodeError, ValueError) as error:
            self._lose(f"it broke the rules of the stream: {error}")

    def _lose(self, reason: str) -> str:
        """Closes the connection for good; all calls end."""
        if not self._lost:
            self._lost = reason
            if self._frames is not None:
                self._frames.close()
            for number, messages in self._calls.items():
                while not messages.empty():
                    messages.get_nowait()
                messages.put_nowait(stream.Failed(number, reason))
        return self._lost

    async def _talk(self, make: Callable[[int], Any], most: int) -> AsyncIterator[Any]:
        """Yields the messages of one call, at most `most`; the last is its `Answer`. Raises WorkerLost, RuntimeError if
        the call failed."""
        number = next(self._numbers)
        messages = self._calls[number] = asyncio.Queue(most)
        try:
            if self._lost or self._frames is None:
                raise WorkerLost(self._lost or "no engine has come yet")
            await self._frames.send(make(number))
            while True:
                message = await messages.get()
                if isinstance(message, stream.Failed):
                    raise WorkerLost(self._lost) if self._lost else RuntimeError(message.reason)
                yield message
                if isinstance(message, stream.Answer):
                    return
        except OSError:
            raise WorkerLost(self._lose("its connection was lost")) from None
        finally:
            del self._calls[number]

    async def _ask(self, make: Callable[[int], Any], kind: type[T]) -> T:
        async with aclosing(self._talk(make, 1)) as messages:  # type: ignore[type-var]
            async for message in messages:
                try:
                    return msgspec.msgpack.decode(message.value, type=kind)
                except (msgspec.ValidationError, AttributeError) as error:
                    raise WorkerLost(self._lose(f"it broke the rules of the stream: {error}")) from None
        raise AssertionError("a call without an answer")

    async def start(self, model_path: str, engine_args: dict[str, Any], gpus: Sequence[str] = ()) -> EngineSize:
        """Has the engine load its own copy of the model, unless it has done so for an earlier connection."""
        model = ModelConfig(path=model_path, trust_remote_code=engine_args["trust_remote_code"])
        self._decode = (await asyncio.to_thread(load_tokenizer, model)).decode
        self._vocabulary = int(text_part(read_config(model_path))["vocab_size"])
        files = await asyncio.to_thread(fingerprint, model_path)
        arguments = {name: value for name, value in engine_args.items() if name in SENT}
        size = await self._ask(lambda call: stream.Begin(call, arguments, files), EngineSize)
        if not (1 <= size.sequences < 1 << 20 and 0 <= size.kv_tokens < 1 << 40 and size.window >= 1):
            raise WorkerLost(self._lose(f"it has an impossible size: {size}"))
        return replace(size, window=engine_args["max_model_len"], cache_bytes=0, node="")

    async def pulse(self) -> Pulse:
        pulse = await self._ask(stream.Beat, Pulse)
        if not all(0 <= value < math.inf for value in (pulse.requests, pulse.silent_s, *astuple(pulse.counts))):
            raise WorkerLost(self._lose(f"its state is impossible: {pulse}"))
        return replace(pulse, leaves=self._leaves)

    async def generate(
        self, key: str, prompt: Int32Array, sampling: Sampling, starts: Sequence[Start]
    ) -> AsyncIterator[list[tuple[int, Response]]]:
        left, first = dict(enumerate(starts)), len(self._versions) - 1
        asked = lambda call: stream.Generate(call, key, prompt, sampling, [*starts])  # noqa: E731
        async with aclosing(self._talk(asked, len(left) + 1)) as messages:  # type: ignore[type-var]
            try:
                async for message in messages:
                    if isinstance(message, stream.Answer):
                        break
                    if (start := left.pop(message.number, None)) is None:
                        raise Deviant(f"response {message.number} of group {key} was not asked for, or came before")
                    served = self._versions[first:]
                    response = checked(message.response, sampling, start, self._vocabulary, served)
                    whole = [*start.token_ids.tolist(), *response.token_ids.tolist()]
                    text = "" if response.aborted else self._decode(whole, skip_special_tokens=True)
                    yield [(message.number, replace(response, text=text))]
            except WorkerLost:
                raise
            except (Deviant, RuntimeError) as error:  # whatever fails there, other engines repeat the group
                raise WorkerLost(self._lose(str(error))) from None
            if left:
                raise WorkerLost(self._lose(f"{len(left)} responses of group {key} are missing"))

    async def abort(self, keys: list[str]) -> None:
        await self._ask(lambda call: stream.Abort(call, keys), type(None))

    async def fetch(self, bucket: Bucket) -> None:
        await self._ask(lambda call: stream.Fetch(call, bucket), type(None))

    async def load(self, version: int, keep: bool, buckets: list[Bucket]) -> None:
        self._versions.append(version)  # it may label tokens before it answers
        await self._ask(lambda call: stream.Load(call, version, keep, buckets), type(None))

    async def stop(self) -> None:
        self._lose("the run has ended")


def fingerprint(model_path: str) -> dict[str, str]:
    """Returns hashes of what must be equal in both copies of the model, by what it is."""
    volatile = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
    parts = {
        "config.json": {name: value for name, value in read_config(model_path).items() if name not in volatile},
        "vocabulary": load_tokenizer(ModelConfig(path=model_path)).get_vocab(),
    }
    return {name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest() for name, part in parts.items()}


def checked(
    response: Response, sampling: Sampling, start: Start, vocabulary: int, versions: Collection[int]
) -> Response:
    """Returns the response; raises Deviant if it cannot be an answer. Its text is not looked at: the driver makes it of
    the tokens. versions: that the engine may have served meanwhile."""
    tokens, length, logprobs = response.token_ids, len(response.token_ids), response.rollout_logprobs

    def need(holds: Any, what: str) -> None:
        if not holds:
            raise Deviant(f"a response has {what}")

    need(length <= sampling.max_tokens - len(start.token_ids), f"{length} tokens, more than it may have")
    need(((tokens >= 0) & (tokens < vocabulary)).all(), "tokens that are not in the vocabulary")
    need(response.finish_reason in ("stop", "length", "abort"), f"the end {response.finish_reason[:20]!r}")
    need(length or response.aborted, "no tokens")
    need(len(logprobs) == length, f"{len(logprobs)} log-probabilities for {length} tokens")
    if sampling.logprobs:
        need(_are_logprobs(logprobs), "values that are no log-probabilities")
    need(0 <= response.seconds < math.inf, f"{response.seconds} seconds")
    need(response.token_mask is None and response.experts is None, "what was not asked for")
    end = 0
    for span in response.policy_versions:
        need(span.version in versions, f"tokens of version {span.version}, which the engine did not serve")
        need(span.start == end <= span.end, "versions that do not follow each other")
        end = span.end
    need(end == length, "tokens without a version")
    support = response.support
    need((support is not None) == bool(sampling.support), "another support than was asked for")
    if support is not None:
        total = int(support.counts.sum(dtype=np.int64))
        need(len(support.counts) == length and len(support.token_ids) == total, "a support of another length")
        need((support.counts <= sampling.support).all(), "a larger support than was asked for")
        need(((support.token_ids >= 0) & (support.token_ids < vocabulary)).all(), "a support outside the vocabulary")
        need((support.logprobs is not None) == sampling.support_logprobs, "another support than was asked for")
        if support.logprobs is not None:
            need(
                len(support.logprobs) == total and _are_logprobs(support.logprobs), "a support of no log-probabilities"
            )
    return replace(response, engine=-1)


def _are_logprobs(values: Any) -> bool:
    return bool(((values <= 0) & (values >= LEAST_LOGPROB)).all())  # false for NaN too
