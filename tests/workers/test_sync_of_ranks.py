"""The weight sync from real actor ranks, to members that die and to a tensor-parallel engine."""

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from dapo.pools import ActorsLost
from dapo.workers.remote import RemoteError
from dapo.workers.weight_sync import WeightSync
from dapo.workers.weights.bucket import digest
from dapo.workers.weights.memory import open_shared
from tests.support.local_actors import local_sync
from tests.support.training.plain_reference import make_config, make_model, start_own_pool
from tests.support.weights.recorder import Recorder, within

RANKS_S = 90  # the ranks' own deadline for a transfer


class Keeper(Recorder):
    """Engines that keep what they load from memory that they share with the ranks."""

    def __init__(self, before=lambda index: None) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self._before = before

    async def connect_weights(self, info, members, timeout_s):
        [[handles]] = info["memory"].values()
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
    cfg.model.dtype, cfg.weight_sync.bucket_bytes, cfg.weight_sync.timeout_s = "bfloat16", 2_000, RANKS_S
    pool = start_own_pool(cfg)
    yield pool, cfg
    pool.close()


MEMBER = """
import sys, torch
from dapo.workers.weights.bucket import digest
from dapo.workers.rendezvous import find_store
from dapo.workers.weights.group import WeightGroup
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
@pytest.mark.parametrize(
    "sent",
    [pytest.param(signal.SIGKILL, id="dies", marks=pytest.mark.nightly), pytest.param(signal.SIGSTOP, id="hangs")],
)
def test_an_engine_lost_in_a_broadcast_is_left_out_in_time_and_another_joins(actors, tmp_path, sent):
    pool, cfg = actors

    async def run() -> None:
        ends = Member()
        own = within(cfg, "broadcast", RANKS_S)  # a member imports torch before it joins
        sync = WeightSync(pool, ends, own)
        try:
            await sync(1)
            ends.signal, own.weight_sync.timeout_s = sent, 5
            began = time.monotonic()
            await sync(2)
            own.weight_sync.timeout_s = RANKS_S
            assert ends.admitted == [(0,), ()] and not ends.refused, "no engine is left, and none may serve a mixture"
            await pool.save(str(tmp_path / "state"), 0)
            await pool.export_hf(str(tmp_path / "hf"))
            assert time.monotonic() - began < RANKS_S - 30, "nothing waited for the ranks' own deadline"
            ends.engines = (0,)
            await sync.rejoin(0)
            assert ends.admitted == [(0,), (), (0,)] and ends.events[-1] == "finish 2 done"
            await sync(3)
        finally:
            await ends.end()

    asyncio.run(run())
    assert (tmp_path / "hf" / "model.safetensors").exists() and list((tmp_path / "state").iterdir())


@pytest.mark.ray
def test_ranks_send_their_whole_model_in_its_type_and_a_dead_one_is_named(actors, model_dir):
    pool, cfg = actors
    ends = Keeper()
    sync = WeightSync(pool, ends, within(cfg, "ipc", RANKS_S))
    asyncio.run(sync(1))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected = {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}
    assert list(ends.tensors) == list(expected), "each once, under transformers' name, a tied head not at all"
    assert all(torch.equal(ends.tensors[name], tensor) for name, tensor in expected.items())

    def kill(index: int) -> None:
        if index == 2:
            ray.kill(pool._ranks.workers[1])

    ends = Keeper(kill)
    sync = WeightSync(pool, ends, within(cfg, "ipc", RANKS_S))
    began = time.monotonic()
    with pytest.raises(ActorsLost, match=r"actor rank 1 \(gathering weight bucket [345] of \d+, version 2\).*Died"):
        asyncio.run(sync(2))
    assert time.monotonic() - began < RANKS_S - 30, "nothing waited for the ranks' own deadline"
    assert ends.refused and "finish 2" not in ends.events


def buffers_of_stages(worker) -> int:
    """Has vLLM's processes make what an engine on GPUs has by now, and returns their number."""
    everywhere = worker._engine.collective_rpc("execute_dummy_batch")
    return len(asyncio.run_coroutine_threadsafe(everywhere, worker._engine.output_handler.get_loop()).result(60))


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_tensor_parallel_engine_gets_its_parts_from_each_transport(ray_cluster, tmp_path):
    from dapo.tiny.random_model import make_random_model
    from dapo.workers.engines.arguments import engine_args
    from dapo.workers.placement import Placement
    from dapo.workers.rollout import RolloutPool
    from tests.support.engines.two import make_config as engine_config
    from tests.workers.test_rollout import change, group_of, largest_difference

    path = str(make_random_model(tmp_path / "model", layers=2))
    cfg = engine_config(path, 1)
    cfg.rollout.vllm |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)

    async def run() -> None:
        pool = RolloutPool(Placement(cfg, "cpu").rollout(), cfg.rollout)
        try:
            await pool.start(path, engine_args(cfg, "cpu"))
            assert await pool.workers[0].__ray_call__.remote(buffers_of_stages) == 2
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
