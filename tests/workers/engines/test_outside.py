"""The driver's end of an engine outside of the cluster, against engines that know the token and against others."""

import asyncio
import math
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dapo.config.paths import resolve_path
from dapo.config.sampling import OutsideConfig
from dapo.types import Response, Sampling, Support, VersionSpan
from dapo.workers.capacity import EngineSize
from dapo.workers.engines import outside, serve, stream
from dapo.workers.engines.outside import SENT, Deviant, OutsideWorker, checked
from dapo.workers.engines.stream import HELLO_S, MAGIC, PROOF_BYTES, RANDOM_BYTES, Frames, Refused
from dapo.workers.engines.worker import RolloutWorker, Start
from dapo.workers.remote import WorkerLost
from dapo.workers.weights.bucket import Bucket, BucketPlan
from tests.support.engines.certificates import TOKEN, write_certificate, write_token

HERE = "127.0.0.1"
SIZE = EngineSize(sequences=8, kv_tokens=100, window=64)
SAMPLING = Sampling(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=5)
START = Start(token_ids=np.array([7], np.int32), seed=3)
RESPONSE = Response(
    token_ids=np.array([1, 2, 3], np.int32),
    rollout_logprobs=np.array([-1, -2, 0], np.float32),
    text="",
    finish_reason="stop",
    policy_versions=(VersionSpan(version=4, start=0, end=1), VersionSpan(version=5, start=1, end=3)),
    engine=3,
    seconds=1.0,
)
BUCKET = Bucket(index=0, plan=BucketPlan((), 8), dtype="float32", digest="", file="0" * 64)


class Door:
    """The driver's end, which listens on a free port, and what an engine needs to reach it."""

    def __init__(self, folder: Path, token: str = TOKEN) -> None:
        self.ca, key = write_certificate(folder, "driver", HERE)
        files = {"certificate_file": self.ca, "key_file": key, "token_file": write_token(folder, token)}
        self.worker = OutsideWorker(OutsideConfig(listen=f"{HERE}:0", **files))

    async def open(self) -> None:
        assert await self.worker.connected(0.0) == (False, [])
        assert self.worker._listener is not None
        self.port = self.worker._listener.getsockname()[1]

    async def enter(self, token: str = TOKEN, ca: str = "") -> Frames:
        return await stream.connect(HERE, self.port, stream.client_context(ca or self.ca), token.encode())

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HERE, self.port, ssl=stream.client_context(self.ca))

    async def refused(self) -> str:
        async with asyncio.timeout(HELLO_S):
            while not (found := (await self.worker.connected(0.05))[1]):
                pass
        return found[0]


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


async def _plain(door: Door) -> None:
    reader, writer = await asyncio.open_connection(HERE, door.port)
    writer.write(MAGIC + bytes(RANDOM_BYTES + PROOF_BYTES))
    assert await reader.read() == b""


async def _wrong_token(door: Door) -> None:
    with pytest.raises(Refused, match="the driver refuses this token"):
        await door.enter("another secret of 16 characters")


async def _wrong_authority(door: Door) -> None:
    other, _ = write_certificate(Path(door.ca).parent, "other", HERE)
    with pytest.raises(ssl.SSLCertVerificationError):
        await door.enter(ca=other)


async def _other_protocol(door: Door) -> None:
    reader, writer = await door.raw()
    writer.write(b"GET / HTTP/1.1\r\nHost: here.example.com\r\n\r\n" + bytes(64))
    assert await reader.read() == b""


async def _recorded_proof(door: Door) -> None:
    """What an engine has sent on another connection."""
    reader, writer = await door.raw()
    randoms = bytes(RANDOM_BYTES)
    writer.write(MAGIC + randoms + stream._mac(TOKEN.encode(), b"engine", randoms + bytes(RANDOM_BYTES)))
    assert len(await reader.readexactly(RANDOM_BYTES)) == RANDOM_BYTES
    assert await reader.read() == bytes(PROOF_BYTES)


async def _message_before_the_proof(door: Door) -> None:
    reader, writer = await door.raw()
    writer.write(MAGIC + bytes(RANDOM_BYTES) + stream._HEADER.pack(1 << 30, 0) + bytes(PROOF_BYTES))
    assert len(await reader.read()) == RANDOM_BYTES + PROOF_BYTES


@pytest.mark.parametrize(
    ("comes", "told"),
    [
        (_plain, "SSLError"),
        (_wrong_token, "does not know the token"),
        (_wrong_authority, "Error"),
        (_other_protocol, "another protocol"),
        (_recorded_proof, "does not know the token"),
        (_message_before_the_proof, "does not know the token"),
    ],
)
def test_who_does_not_know_the_token_is_refused_and_told_of(
    door: Door, comes: Callable[[Door], Awaitable[None]], told: str
) -> None:
    async def run() -> None:
        await door.open()
        await comes(door)
        assert told in await door.refused()
        assert not door.worker._here.is_set()
        await door.enter()  # others can still come
        assert (await door.worker.connected(1.0))[0]

    asyncio.run(run())


def test_an_engine_that_speaks_before_it_is_heard_is_let_in(door: Door) -> None:
    async def run() -> None:
        await door.open()
        entering = asyncio.get_running_loop().run_in_executor(None, asyncio.run, door.enter())
        time.sleep(0.5)  # the driver's end is busy while TLS begins
        await entering
        assert (await door.worker.connected(1.0))[0]

    asyncio.run(run())


def test_who_says_nothing_is_closed_and_cannot_fill_the_door(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HELLO_S", 0.2)
    monkeypatch.setattr(outside, "MAX_KNOCKING", 2)

    async def run() -> None:
        await door.open()
        silent = [await asyncio.open_connection(HERE, door.port) for _ in range(3)]
        assert await silent[2][0].read() == b""
        assert "too many" in await door.refused()
        assert [await reader.read() for reader, _ in silent] == [b""] * 3
        monkeypatch.setattr(stream, "HELLO_S", 10.0)
        await door.enter()

    asyncio.run(run())


async def _twice(frames: Frames) -> None:
    await frames.send(stream.Leaving(0))
    frames._sent -= 1
    await frames.send(stream.Leaving(0))


async def _from_another_connection(frames: Frames) -> None:
    frames._sent = int.from_bytes(stream._mac(TOKEN.encode(), b"frames engine", bytes(64))[:7])
    await frames.send(stream.Leaving(0))


async def _too_long(frames: Frames) -> None:
    frames._writer.write(stream._HEADER.pack(stream.MAX_FRAME_BYTES + 1, frames._sent))


async def _not_a_message(frames: Frames) -> None:
    await frames.send({"type": "Exec", "call": 0, "code": "1"})


async def _of_a_wrong_type(frames: Frames) -> None:
    await frames.send({"type": "Part", "call": 0, "number": 0, "response": {"token_ids": "1, 2"}})


async def _another_array(frames: Frames) -> None:
    await frames.send(stream.Part(0, 0, replace(RESPONSE, token_ids=np.zeros(5, np.uint8))))


async def _more_than_asked_for(frames: Frames) -> None:
    for _ in range(2):
        await frames.send(stream.Part(0, 0, RESPONSE))


async def _another_answer(frames: Frames) -> None:
    await frames.send(stream.Answer(0, msgspec.Raw(stream.encode({"sequences": "many"}))))


@pytest.mark.parametrize(
    ("sends", "told"),
    [
        (_twice, "twice or out of order"),
        (_from_another_connection, "twice or out of order"),
        (_too_long, "more than"),
        (_not_a_message, "Invalid value 'Exec'"),
        (_of_a_wrong_type, "came for an array"),
        (_another_array, "an array of b'|u1' came"),
        (_more_than_asked_for, "more than it was asked for"),
        (_another_answer, "Expected `null`"),
    ],
)
def test_an_engine_that_breaks_the_rules_is_lost(
    door: Door, sends: Callable[[Frames], Awaitable[None]], told: str
) -> None:
    async def run() -> None:
        await door.open()
        frames = await door.enter()
        asked = asyncio.create_task(door.worker.fetch(BUCKET))
        await frames.receive()
        await sends(frames)
        with pytest.raises(WorkerLost, match=told):
            await asked
        with pytest.raises(WorkerLost, match=told):
            await door.worker.pulse()
        with pytest.raises((OSError, EOFError)):
            await frames.receive()

    asyncio.run(run())


SUPPORT = Support(
    counts=np.array([2, 0, 1], np.uint16),
    token_ids=np.array([0, 1, 9], np.int32),
    logprobs=np.array([-1, -2, -3], np.float32),
)
WITH_SUPPORT = replace(SAMPLING, support=2, support_logprobs=True)


def test_answers_as_asked_for_are_taken() -> None:
    assert checked(RESPONSE, SAMPLING, START, 10, [4, 5]).engine == -1
    with_support = replace(RESPONSE, support=SUPPORT)
    assert checked(with_support, WITH_SUPPORT, START, 10, [4, 5]).support is SUPPORT
    nothing = replace(RESPONSE, token_ids=np.zeros(0, np.int32), rollout_logprobs=np.zeros(0, np.float32))
    checked(replace(nothing, finish_reason="abort", policy_versions=()), SAMPLING, START, 10, [4, 5])
    evaluated = replace(RESPONSE, rollout_logprobs=np.full(3, np.nan, np.float32))
    checked(evaluated, replace(SAMPLING, logprobs=False), START, 10, [4, 5])


def of(**changes: Any) -> Response:
    return replace(RESPONSE, **changes)


def logprobs(*values: float) -> dict[str, Any]:
    return {"rollout_logprobs": np.array(values, np.float32)}


def spans(*values: tuple[int, int, int]) -> dict[str, Any]:
    return {"policy_versions": tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in values)}


@pytest.mark.parametrize(
    ("response", "told"),
    [
        (of(token_ids=np.array([1, 2, 10], np.int32)), "not in the vocabulary"),
        (of(token_ids=np.array([1, -2, 3], np.int32)), "not in the vocabulary"),
        (of(token_ids=np.zeros(5, np.int32)), "5 tokens, more than"),
        (of(token_ids=np.zeros(0, np.int32)), "no tokens"),
        (of(**logprobs(-1, -1)), "2 log-probabilities for 3"),
        (of(**logprobs(-1, -1, math.nan)), "no log-probabilities"),
        (of(**logprobs(-1, -1, -math.inf)), "no log-probabilities"),
        (of(**logprobs(-1, -1, 0.1)), "no log-probabilities"),
        (of(finish_reason="error"), "the end 'error'"),
        (of(seconds=math.nan), "nan seconds"),
        (of(seconds=-1.0), "-1.0 seconds"),
        (of(experts=np.zeros((3, 1, 1), np.uint8)), "not asked for"),
        (of(token_mask=np.ones(3, np.bool_)), "not asked for"),
        (of(support=SUPPORT), "another support"),
        (of(**spans((6, 0, 3))), "version 6"),
        (of(**spans((4, 0, 2))), "without a version"),
        (of(**spans((4, 0, 1), (5, 2, 3))), "do not follow"),
        (of(**spans((4, 0, 5), (5, 5, 3))), "do not follow"),
    ],
)
def test_what_cannot_be_an_answer_is_refused(response: Response, told: str) -> None:
    with pytest.raises(Deviant, match=told):
        checked(response, SAMPLING, START, 10, [4, 5])


@pytest.mark.parametrize(
    "support",
    [
        None,
        replace(SUPPORT, counts=np.array([3, 0, 0], np.uint16)),
        replace(SUPPORT, counts=np.array([2, 0, 2], np.uint16)),
        replace(SUPPORT, token_ids=np.array([0, 1, 10], np.int32)),
        replace(SUPPORT, logprobs=None),
        replace(SUPPORT, logprobs=np.array([-1, -2, math.nan], np.float32)),
    ],
)
def test_a_support_that_was_not_asked_for_is_refused(support: Support | None) -> None:
    with pytest.raises(Deviant):
        checked(replace(RESPONSE, support=support), WITH_SUPPORT, START, 10, [4, 5])


async def begun(door: Door, model: str) -> tuple[Frames, stream.Begin]:
    """An engine that has started."""
    await door.open()
    frames = await door.enter()
    arguments = {"dtype": "float32", "max_model_len": 64, "trust_remote_code": False, "hf_overrides": {}}
    starting = asyncio.create_task(door.worker.start(model, arguments))
    begin = stream.to_engine(await frames.receive())
    await frames.send(stream.Answer(begin.call, msgspec.Raw(stream.encode(SIZE))))
    assert await starting == SIZE
    return frames, begin


def test_a_group_comes_back_with_texts_of_its_tokens(door: Door) -> None:
    model = resolve_path("pkg://dapo.tiny/base")

    async def run() -> None:
        frames, begin = await begun(door, model)
        assert begin.arguments == {"dtype": "float32", "max_model_len": 64} and set(begin.arguments) <= set(SENT)
        assert begin.model == outside.fingerprint(model)
        parts = door.worker.generate("key", np.array([5, 6], np.int32), SAMPLING, [START])
        first = asyncio.ensure_future(anext(parts))
        asked = stream.to_engine(await frames.receive())
        assert (asked.key, asked.prompt.tolist(), asked.sampling) == ("key", [5, 6], SAMPLING)
        assert asked.starts[0].seed == START.seed and asked.starts[0].token_ids.tolist() == [7]
        said = replace(RESPONSE, text="what the engine says", policy_versions=(VersionSpan(version=0, start=0, end=3),))
        await frames.send(stream.Part(asked.call, 0, said))
        await frames.send(stream.Answer(asked.call, msgspec.Raw(stream.encode(None))))
        [(number, response)] = await first
        assert number == 0 and response.text == door.worker._decode([7, 1, 2, 3], skip_special_tokens=True)
        assert astuple(replace(response, text=""))[2:] == astuple(replace(said, text="", engine=-1))[2:]
        with pytest.raises(StopAsyncIteration):
            await anext(parts)

    asyncio.run(run())


def test_a_group_of_a_lost_engine_is_lost_with_it_and_so_is_one_that_fails(door: Door) -> None:
    async def run() -> None:
        frames, _ = await begun(door, resolve_path("pkg://dapo.tiny/base"))
        parts = door.worker.generate("key", np.array([5], np.int32), SAMPLING, [START])
        first = asyncio.ensure_future(anext(parts))
        asked = stream.to_engine(await frames.receive())
        await frames.send(stream.Failed(asked.call, "CUDA error"))
        with pytest.raises(WorkerLost, match="CUDA error"):
            await first
        with pytest.raises(WorkerLost, match="CUDA error"):
            await door.worker.abort(["key"])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("token", "mode", "told"), [("short", 0o600, "needs 16"), (TOKEN, 0o644, "chmod 600")], ids=["short", "readable"]
)
def test_a_token_that_others_know_is_refused(tmp_path: Path, token: str, mode: int, told: str) -> None:
    file = write_token(tmp_path, token)
    Path(file).chmod(mode)
    with pytest.raises(ValueError, match=told):
        stream.read_token(file)


def test_the_site_takes_only_known_arguments_and_its_own_model(tmp_path: Path) -> None:
    ca, _ = write_certificate(tmp_path, "driver", HERE)
    words = [
        f"{HERE}:1",
        "--model",
        "pkg://dapo.tiny/base",
        "--token",
        write_token(tmp_path),
        "--ca",
        ca,
        "--store",
        "x",
    ]
    given = serve.parse([*words, "gpu_memory_utilization=0.5"])
    assert given.arguments == {"gpu_memory_utilization": 0.5}
    right = outside.fingerprint(given.model)
    for begin, told in [
        (stream.Begin(0, {"worker_cls": "os.system"}, right), "worker_cls"),
        (stream.Begin(0, {"dtype": {"a": 1}}, right), "dtype"),
        (stream.Begin(0, {"dtype": "float32"}, right | {"config.json": "0"}), "differs from the run's"),
    ]:
        engine = serve.OutsideEngine(given, tmp_path)
        with pytest.raises(ValueError, match=told):
            asyncio.run(engine._begin(begin))
        assert engine._engine is None


def test_the_command_of_the_readme_is_accepted() -> None:
    readme = Path(__file__).resolve().parents[3] / "workers" / "README.md"
    [words] = re.findall(r"^dapo serve (.*)$", readme.read_text(), re.MULTILINE)
    assert serve.parser().parse_args(words.split()).store == "s3://bucket/run"


def test_the_site_tells_what_fails(tmp_path: Path) -> None:
    ca, _ = write_certificate(tmp_path, "driver", HERE)
    files = ["--token", write_token(tmp_path), "--ca", ca, "--store", str(tmp_path / "none")]
    engine = serve.OutsideEngine(serve.parse([f"{HERE}:1", "--model", "pkg://dapo.tiny/base", *files]), tmp_path)
    sent: list[Any] = []

    class There:
        async def send(self, message: Any) -> None:
            sent.append(message)

    async def run() -> None:
        await engine._answer(There(), stream.Fetch(7, BUCKET))
        engine._engine, engine._starting = RolloutWorker(), asyncio.create_task(asyncio.sleep(0))
        await engine._starting
        await engine._answer(There(), stream.Fetch(8, BUCKET))

    asyncio.run(run())
    assert [(message.call, message.reason.split(":")[0]) for message in sent] == [
        (7, "RuntimeError"),
        (8, "FileNotFoundError"),
    ]


def test_the_site_touches_no_file_but_its_buckets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no SHA-256"):
        serve.path_of(replace(BUCKET, file="../../etc/passwd"), tmp_path)
