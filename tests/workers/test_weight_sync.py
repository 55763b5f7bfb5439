"""The weight sync's pipeline on stand-ins, from real actor ranks, and to a tensor-parallel engine."""

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from dapo.config.schema import Config
from dapo.derived import resolve_transport
from dapo.pools import ActorsLost
from dapo.types import TrainSequence
from tests.support.local_actors import local_sync
from tests.support.training.plain_reference import make_config, make_model, start_own_pool
from workers.remote import RemoteError
from workers.weight_sync import WeightSync
from workers.weights.bucket import Endpoint, digest
from workers.weights.memory import open_shared

BUCKETS = 6
STEP_S = 0.02


def within(cfg: Config, transport: str, timeout_s: float = 30) -> Config:
    """The configuration with a transport and a deadline for a sync."""
    cfg = deepcopy(cfg)
    cfg.weight_sync.transport, cfg.weight_sync.timeout_s = transport, timeout_s
    return cfg


class Recorder:
    """Both ends of a sync. A step takes `STEP_S` and is noted at its begin and end; `fail` may raise at a begin."""

    def __init__(self, fail=lambda step, index: None) -> None:
        self.events: list[str] = []
        self.existing = self.most = 0
        self.refused = ""
        self.engines: tuple[int, ...] = (0, 1, 2)
        self.started_again: list[int] = []
        self.lost: list[tuple[int, ...]] = []  # engines that are found lost, at each failure in turn
        self.admitted: list[tuple[int, ...]] = []
        self.canary: list[TrainSequence] = []
        self._fail = fail

    def restarts(self):
        return {}

    def members(self):
        return self.engines

    def identities(self, members):
        return tuple((k, self.started_again.count(k)) for k in members)

    def num_receivers(self, members):
        return len(members)

    async def lose_silent(self, members, grace_s):
        lost = self.lost.pop(0) if self.lost else ()
        self.engines = tuple(k for k in self.engines if k not in lost)
        return bool(lost)

    async def canaries(self, members):
        return self.canary

    async def policy_logprobs(self, sequences):
        return [np.zeros_like(sequence.rollout_logprobs) for sequence in sequences]

    def admit(self, members):
        self.admitted.append(members)

    async def _step(self, step: str, index: int) -> None:
        self.events.append(f"{step} {index}")
        self._fail(step, index)
        await asyncio.sleep(STEP_S)
        self.events.append(f"{step} {index} done")

    async def open_weights(self, transport):
        self.transport = transport
        return BUCKETS, [Endpoint(capacity=80, address="here", port=7), None]

    async def join_weights(self, num_receivers):
        await self._step("join", num_receivers)

    async def gather_bucket(self, index, what):
        self.existing += 1
        self.most = max(self.most, self.existing)
        await self._step("gather", index)
        return SimpleNamespace(index=index, failure="")

    async def leave_weights(self, members, timeout_s):
        await self._step("leave", len(members))

    async def connect_weights(self, info, members, timeout_s):
        self.info = info
        await self._step("connect", info["group_size"])

    async def start_update(self, members, timeout_s):
        await self._step("start", 0)

    async def load_bucket(self, bucket, what, members, timeout_s):
        assert f"weight bucket {bucket.index} of {BUCKETS}" in what
        await self._step("load", bucket.index)
        self.existing -= 1

    async def finish_update(self, version, members, timeout_s):
        await self._step("finish", version)

    def refuse(self, reason):
        self.refused = reason

    def sync(self, timeout_s: float = 10) -> WeightSync:
        return WeightSync(self, self, within(Config(), "broadcast", timeout_s))


def test_the_next_bucket_is_gathered_while_one_loads_and_two_exist():
    ends = Recorder()

    async def two():
        sync = ends.sync()
        await sync(1)
        await sync(2)

    asyncio.run(two())
    events = ends.events
    assert [e for e in events if e.startswith(("connect", "join"))][:2] == ["join 3", "connect 4"], "both at once"
    assert events.count("connect 4") == 1, "the second sync uses the same connection"
    one = events[events.index("start 0") : events.index("finish 1 done") + 1]
    assert [e for e in one if e.startswith("load") and "done" not in e] == [f"load {k}" for k in range(BUCKETS)]
    for k in range(BUCKETS - 1):
        assert one.index(f"gather {k + 1}") < one.index(f"load {k} done"), "they overlap"
        assert k == 0 or one.index(f"load {k - 1} done") < one.index(f"gather {k + 1}"), "its slot is free"
    assert one.index("start 0 done") < one.index("load 0") and one.index("finish 1") > one.index("load 5 done")
    assert ends.most == 2 and ends.existing == 0 and not ends.refused
    assert (ends.info["address"], ends.info["port"], ends.info["memory"]) == ("here", 7, {})


@pytest.mark.parametrize("step", ["join", "connect", "start", "gather", "load", "finish"])
def test_a_failure_anywhere_stops_the_sync_and_the_engines(step):
    def fail(now, index):
        if now == step and (step not in ("gather", "load") or index == 3):
            raise RemoteError(f"{step} broke")

    ends = Recorder(fail)
    with pytest.raises(RemoteError, match=f"{step} broke"):
        asyncio.run(ends.sync()(1))
    assert "version 1 failed" in ends.refused
    assert "finish 1 done" not in ends.events


def fails_once(step: str, index: int):
    """A failure the first time that this step begins."""
    left = [(step, index)]

    def fail(*now):
        if [now] == left:
            left.clear()
            raise RemoteError(f"{step} {index} broke")

    return fail


@pytest.mark.parametrize(("step", "index"), [("connect", 4), ("start", 0), ("gather", 3), ("load", 3), ("finish", 1)])
def test_an_engine_that_is_lost_in_a_sync_is_left_out_and_the_others_get_all_of_it(step, index):
    ends = Recorder(fails_once(step, index))
    ends.lost = [(1,)]
    asyncio.run(ends.sync()(1))
    assert ends.admitted == [(0, 2)] and not ends.refused
    again = ends.events[ends.events.index("connect 3") :]
    assert [event for event in again if event.startswith("load") and "done" not in event] == [
        f"load {k}" for k in range(BUCKETS)
    ]


def test_one_failure_without_a_lost_engine_is_tried_again():
    ends = Recorder(fails_once("load", 3))
    asyncio.run(ends.sync()(1))
    assert ends.admitted == [(0, 1, 2)] and not ends.refused
    assert ends.events.count("connect 4 done") == 2, "both ends forget what was on its way"


def test_without_engines_a_sync_waits_for_none():
    ends = Recorder()
    ends.engines = ()
    asyncio.run(ends.sync()(1))
    assert not ends.events and not ends.admitted and not ends.refused


def canary(own: float) -> TrainSequence:
    """Three tokens to which the engine gives this log-probability, and the actors 0."""
    return TrainSequence(
        token_ids=np.zeros(5, dtype=np.int32),
        num_prompt_tokens=2,
        rollout_logprobs=np.full(3, own, dtype=np.float32),
        advantage=0.0,
        token_weight=0.0,
        staleness=np.zeros(3, dtype=np.int32),
    )


def test_an_engine_that_starts_again_gets_the_weights_alone_and_serves_when_it_agrees_with_the_actors():
    ends = Recorder()

    async def run():
        sync = ends.sync()
        await sync.rejoin(1)
        assert not ends.events, "before the first sync there is nothing to join"
        await sync(1)
        ends.canary = [canary(-0.01)]
        await sync.rejoin(1)
        assert ends.admitted == [(0, 1, 2), (1,)]
        assert ends.events[-1] == "finish 1 done" and ends.events.count("connect 2") == 1
        ends.canary = [canary(-0.2)]
        with pytest.raises(RemoteError, match=r"other log-probabilities .* 0.2, `weight_sync.max_mean_logprob_diff`"):
            await sync.rejoin(2)
        assert len(ends.admitted) == 2
        ends.canary = []
        await sync(2)
        assert ends.admitted[-1] == (0, 1, 2) and ends.events.count("connect 4") == 2, "all of them meet again"

    asyncio.run(run())


def test_an_engine_joins_neither_within_an_update_nor_after_a_sync_that_failed():
    ends = Recorder()

    async def run():
        sync = ends.sync()
        await sync(1)
        async with sync.lock:
            joining = asyncio.create_task(sync.rejoin(1))
            await asyncio.sleep(3 * STEP_S)
            assert ends.admitted == [(0, 1, 2)], "the actors' weights change meanwhile"
            await sync(2)
        await joining
        assert ends.events[-1] == "finish 2 done" and ends.admitted[-1] == (1,)
        ends._fail = lambda step, index: (_ for _ in ()).throw(RemoteError("broke"))
        with pytest.raises(RemoteError, match="broke"):
            await sync(3)
        ends._fail = lambda step, index: None
        count = len(ends.events)
        await sync.rejoin(1)
        assert len(ends.events) == count and ends.refused

    asyncio.run(run())


def test_a_sync_without_end_names_where_it_stood():
    def hang(step, index):
        if (step, index) == ("load", 2):
            ends._step = lambda *_: asyncio.sleep(60)

    ends = Recorder(hang)
    with pytest.raises(RemoteError, match=r"more than 1.5 s, .* loading weight bucket 2 of 6, version 1; raise"):
        asyncio.run(ends.sync(timeout_s=1.5)(1))
    assert ends.refused


@pytest.mark.parametrize(
    ("transport", "colocate", "resolved"),
    [
        ("auto", False, "broadcast"),
        ("auto", True, "ipc"),
        ("broadcast", True, "broadcast"),
    ],
)
def test_auto_takes_the_nearest_way(transport, colocate, resolved):
    cfg = Config()
    cfg.weight_sync.transport, cfg.trainer.colocate = transport, colocate
    assert resolve_transport(cfg) == resolved


class Keeper(Recorder):
    """Engines that keep what they load from memory that they share with the ranks."""

    def __init__(self, before=lambda index: None) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self._before = before

    async def connect_weights(self, info, members, timeout_s):
        [handles] = info["memory"].values()
        self._slots = [open_shared(handle, torch.device("cpu")) for handle in handles]

    async def load_bucket(self, bucket, what, members, timeout_s):
        self._before(bucket.index)
        data = self._slots[bucket.index % 2][: bucket.plan.num_bytes].clone()
        assert digest(data) == bucket.digest
        dtype = getattr(torch, bucket.dtype)
        elements = data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)
        for place in bucket.plan.tensors:
            self.tensors[place.name] = elements[place.start : place.stop].view(place.shape)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module")
def actors(ray_cluster, model_dir: Path) -> Iterator:
    """Two ranks that compute in bfloat16."""
    cfg = make_config(model_dir, num_workers=2)
    cfg.model.dtype, cfg.weight_sync.bucket_bytes, cfg.weight_sync.timeout_s = "bfloat16", 2_000, 30
    pool = start_own_pool(cfg)
    yield pool, cfg
    pool.close()


MEMBER = """
import sys, torch
from workers.weights.bucket import digest
from workers.weights.group import WeightGroup, find_store
store = find_store(sys.argv[1], int(sys.argv[2]), 30)
group = WeightGroup(store, rank=1, size=2, device=torch.device("cpu"), timeout_s=30)
print("met", flush=True)
for line in sys.stdin:
    data = torch.empty(int(line), dtype=torch.uint8)
    group.wait(group.broadcast(data))
    print(digest(data), flush=True)
"""


class Member(Recorder):
    """An engine as a process that takes part in the broadcasts, and gets `signal` at bucket 2 of a sync."""

    def __init__(self) -> None:
        super().__init__()
        self.engines, self.signal = (0,), 0

    async def connect_weights(self, info, members, timeout_s):
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-c", MEMBER, info["address"], str(info["port"]))
        self.process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert await self.process.stdout.readline() == b"met\n"

    async def load_bucket(self, bucket, what, members, timeout_s):
        if self.signal and bucket.index == 2:
            self.process.send_signal(self.signal)
        self.process.stdin.write(f"{bucket.plan.num_bytes}\n".encode())
        if (await self.process.stdout.readline()).decode().strip() != bucket.digest:
            raise RemoteError(f"the engine did not load {what}")

    async def end(self) -> None:
        with suppress(ProcessLookupError):  # it was killed before
            self.process.kill()
        await self.process.wait()

    async def lose_silent(self, members, grace_s):
        if lost := bool(self.signal):
            await self.end()
            self.engines, self.signal = (), 0
        return lost


@pytest.mark.ray
@pytest.mark.parametrize("sent", [pytest.param(signal.SIGKILL, id="dies"), pytest.param(signal.SIGSTOP, id="hangs")])
def test_an_engine_lost_in_a_broadcast_is_left_out_in_time_and_another_joins(actors, tmp_path, sent):
    pool, cfg = actors

    async def run() -> None:
        ends = Member()
        sync = WeightSync(pool, ends, within(cfg, "broadcast", 5))
        try:
            await sync(1)
            ends.signal = sent
            began = time.monotonic()
            await sync(2)
            assert ends.admitted == [(0,)] and not ends.refused, "no engine is left, and none may serve a mixture"
            await pool.save(str(tmp_path / "state"), 0)
            await pool.export_hf(str(tmp_path / "hf"))
            assert time.monotonic() - began < 15, "the ranks' own deadline is 30 s"
            ends.engines = (0,)
            await sync.rejoin(0)
            assert ends.admitted == [(0,), (0,)] and ends.events[-1] == "finish 2 done"
            await sync(3)
        finally:
            await ends.end()

    asyncio.run(run())
    assert (tmp_path / "hf" / "model.safetensors").exists() and list((tmp_path / "state").iterdir())


@pytest.mark.ray
def test_ranks_send_their_whole_model_in_its_type_and_a_dead_one_is_named(actors, model_dir):
    pool, cfg = actors
    ends = Keeper()
    sync = WeightSync(pool, ends, within(cfg, "ipc"))
    asyncio.run(sync(1))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected = {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}
    assert list(ends.tensors) == list(expected), "each once, under transformers' name, a tied head not at all"
    assert all(torch.equal(ends.tensors[name], tensor) for name, tensor in expected.items())

    def kill(index: int) -> None:
        if index == 2:
            ray.kill(pool._workers[1])

    ends = Keeper(kill)
    sync = WeightSync(pool, ends, within(cfg, "ipc"))
    began = time.monotonic()
    with pytest.raises(ActorsLost, match=r"actor rank 1 \(gathering weight bucket [345] of \d+, version 2\).*Died"):
        asyncio.run(sync(2))
    assert time.monotonic() - began < 15, "the deadline is 30 s"
    assert ends.refused and "finish 2" not in ends.events


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_tensor_parallel_engine_gets_its_part_from_each_transport(ray_cluster, tmp_path):
    from dapo.tiny.random_model import make_random_model
    from tests.workers.test_rollout import change, group_of, largest_difference
    from tests.workers.test_rollout import make_config as engine_config
    from workers.cluster import Placement, engine_args
    from workers.rollout import RolloutPool

    path = str(make_random_model(tmp_path / "model", layers=2))
    cfg = engine_config(path, 1)
    cfg.rollout.vllm |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)

    async def run() -> None:
        pool = RolloutPool(Placement(cfg, "cpu").rollout(), cfg.rollout)
        try:
            await pool.start(path, engine_args(cfg, "cpu"))
            for version, transport in enumerate(("broadcast", "ipc"), start=1):
                for parameter in model.parameters():
                    change(parameter, generator, 0.2, 0.05)
                await local_sync(pool, model, transport, 100_000)(version)
                responses = await group_of(pool, transport, 10)
                assert largest_difference(model, responses) <= 1e-4, transport
                assert {span.version for response in responses for span in response.policy_versions} == {version}
        finally:
            await pool.stop(3.0)

    asyncio.run(run())
