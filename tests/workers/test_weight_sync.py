"""The weight sync's pipeline on stand-ins, from real actor ranks, and to a tensor-parallel engine."""

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from dapo.config.actor import WeightSyncConfig
from dapo.config.schema import Config
from dapo.derived import resolve_transport
from tests.support.local_actors import local_sync
from tests.support.plain_reference import make_config, make_model, start_own_pool
from workers.remote import RemoteError
from workers.weight_sync import WeightSync
from workers.weights.bucket import Endpoint, digest
from workers.weights.memory import open_shared

BUCKETS = 6
STEP_S = 0.02


class Recorder:
    """Both ends of a sync. A step takes `STEP_S` and is noted at its begin and end; `fail` may raise at a begin."""

    def __init__(self, fail=lambda step, index: None) -> None:
        self.events: list[str] = []
        self.existing = self.most = 0
        self.refused = ""
        self.num_receivers = 3
        self._fail = fail

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
        return SimpleNamespace(index=index)

    async def connect_weights(self, info, timeout_s):
        self.info = info
        await self._step("connect", info["group_size"])

    async def start_update(self, timeout_s):
        await self._step("start", 0)

    async def load_bucket(self, bucket, what, timeout_s):
        assert f"weight bucket {bucket.index} of {BUCKETS}" in what
        await self._step("load", bucket.index)
        self.existing -= 1

    async def finish_update(self, version, timeout_s):
        await self._step("finish", version)

    def refuse(self, reason):
        self.refused = reason

    def sync(self, timeout_s: float = 10) -> WeightSync:
        return WeightSync(self, self, WeightSyncConfig(timeout_s=timeout_s), "broadcast")


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

    async def connect_weights(self, info, timeout_s):
        [handles] = info["memory"].values()
        self._slots = [open_shared(handle, torch.device("cpu")) for handle in handles]

    async def load_bucket(self, bucket, what, timeout_s):
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
        self.num_receivers, self.signal = 1, 0

    async def connect_weights(self, info, timeout_s):
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-c", MEMBER, info["address"], str(info["port"]))
        self.process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert await self.process.stdout.readline() == b"met\n"

    async def load_bucket(self, bucket, what, timeout_s):
        if self.signal and bucket.index == 2:
            self.process.send_signal(self.signal)
        self.process.stdin.write(f"{bucket.plan.num_bytes}\n".encode())
        if (await self.process.stdout.readline()).decode().strip() != bucket.digest:
            raise RemoteError(f"the engine did not load {what}")


@pytest.mark.ray
@pytest.mark.parametrize(
    ("sent", "said"),
    [
        pytest.param(signal.SIGKILL, "did not load weight bucket 2", id="dies"),
        pytest.param(signal.SIGSTOP, "more than 5 s, .* loading weight bucket 2", id="hangs"),
    ],
)
def test_an_engine_lost_in_a_broadcast_ends_the_sync_in_time_and_the_ranks_still_save(actors, tmp_path, sent, said):
    pool, cfg = actors

    async def run() -> None:
        ends = Member()
        sync = WeightSync(pool, ends, replace(cfg.weight_sync, timeout_s=5), "broadcast")
        try:
            await sync(1)
            ends.signal = sent
            began = time.monotonic()
            with pytest.raises(RemoteError, match=said):
                await sync(2)
            await pool.save(str(tmp_path / "state"))
            await pool.export_hf(str(tmp_path / "hf"))
            assert time.monotonic() - began < 15, "the ranks' own deadline is 30 s"
        finally:
            if ends.process.returncode is None:
                ends.process.kill()
            await ends.process.wait()

    asyncio.run(run())
    assert (tmp_path / "hf" / "model.safetensors").exists() and list((tmp_path / "state").iterdir())


@pytest.mark.ray
def test_ranks_send_their_whole_model_in_its_type_and_a_dead_one_is_named(actors, model_dir):
    pool, cfg = actors
    ends = Keeper()
    sync = WeightSync(pool, ends, cfg.weight_sync, "ipc")
    asyncio.run(sync(1))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected = {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}
    assert list(ends.tensors) == list(expected), "each once, under transformers' name, a tied head not at all"
    assert all(torch.equal(ends.tensors[name], tensor) for name, tensor in expected.items())

    def kill(index: int) -> None:
        if index == 2:
            ray.kill(pool._workers[1])

    ends = Keeper(kill)
    sync = WeightSync(pool, ends, cfg.weight_sync, "ipc")
    began = time.monotonic()
    with pytest.raises(RemoteError, match=r"actor rank 1 \(gathering weight bucket [345] of \d+, version 2\).*Died"):
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
        pool = RolloutPool(Placement(cfg, "cpu").rollout(), start_timeout_s=300, timeout_s=120)
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
