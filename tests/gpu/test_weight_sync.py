"""The parts of the weight sync that only a GPU runs: CUDA IPC, NCCL, the digest there, both roles on one device."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from dapo.config.paths import resolve_path
from dapo.workers.rendezvous import serve_store
from dapo.workers.weights.bucket import digest
from dapo.workers.weights.group import WeightGroup
from dapo.workers.weights.memory import place, share, share_again

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda", 0)
CYCLES = 5
READER = """
import json, sys, torch
from dapo.workers.weights.memory import open_shared, place
device = torch.device("cuda", 0)
handle = json.loads(sys.stdin.readline())
buffer = open_shared(handle, device)
print(place(device), int(buffer.sum()), flush=True)
sys.stdin.readline()
print(int(buffer.sum()), flush=True)
"""


def test_the_digest_is_the_hosts():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, ((1 << 24) + 1000,), generator=generator, dtype=torch.int64)
    assert digest(words.to(DEVICE).view(torch.uint8)) == digest(words.view(torch.uint8))


@pytest.mark.parametrize("times", [1, 3], ids=["first", "third"])
def test_another_process_reads_the_same_memory_whenever_it_changes(times):
    """Also by a later handle, when those before it were never opened, as by engines that died."""
    buffer, handle = share(1000, DEVICE)
    for _ in range(times - 1):
        handle = share_again(buffer, handle)
    buffer.fill_(3)
    torch.cuda.synchronize()
    reader = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin is not None and reader.stdout is not None
    try:
        print(json.dumps(handle), file=reader.stdin, flush=True)
        assert reader.stdout.readline().split() == [place(DEVICE), "3000"]
        buffer.fill_(5)
        torch.cuda.synchronize()
        print("again", file=reader.stdin, flush=True)
        assert reader.stdout.readline().strip() == "5000"
    finally:
        reader.kill()
        reader.wait(30)


def test_a_group_of_one_broadcasts_by_nccl():
    group = WeightGroup(serve_store("127.0.0.1", 30), rank=0, size=1, device=DEVICE, timeout_s=30)
    data = torch.arange(64, dtype=torch.uint8, device=DEVICE)
    group.wait(group.broadcast(data))
    assert data.tolist() == list(range(64))


def test_a_group_of_nccl_that_is_given_up_ends_no_process_and_another_takes_its_place():
    data = torch.arange(64, dtype=torch.uint8, device=DEVICE)
    for _ in range(2):
        group = WeightGroup(serve_store("127.0.0.1", 30), rank=0, size=1, device=DEVICE, timeout_s=30)
        group.wait(group.broadcast(data))
        group.close()
        with pytest.raises(RuntimeError, match="given up"):
            group.broadcast(data)
    assert data.tolist() == list(range(64))


@pytest.fixture
def own_ray() -> Iterator[None]:
    from dapo.workers.cluster import connect, leave  # here, so that the tests above run where Ray and vLLM are not

    connect("local", worker_logs=False)
    yield
    leave()


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engines", [1, 2])
def test_both_roles_on_one_gpu(own_ray, tmp_path, engines):
    """Each sync is checked by digest at every engine; a failed one raises."""
    from dapo.tiny.random_model import make_random_model
    from dapo.tools.bench.__main__ import parse
    from dapo.tools.bench.sync import measure, to_config

    path = str(make_random_model(tmp_path / "model", layers=4, hidden=512, heads=8, intermediate=1024))
    options = parse(["sync", "--ranks", "1", "--colocate", "--device", "cuda", "--bucket-mib", "1"])
    cfg = to_config(options, path)
    cfg.rollout.num_engines = cfg.rollout.engines_per_gpu = engines
    cfg.rollout.vllm["gpu_memory_utilization"] = 0.6 / engines
    seconds = asyncio.run(measure(cfg, ["ipc"], 2, 2))
    assert {transport: len(each) for transport, each in seconds.items()} == {"ipc": 4}


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_an_engine_that_slept_computes_what_the_actors_do_and_its_memory_was_theirs(own_ray):
    from dapo.tools.bench.__main__ import parse
    from dapo.tools.bench.cycle import measure, to_config

    words = ["cycle", "--bucket-mib", "1", "--tokens", "512", "rollout.vllm.enforce_eager=true"]
    cfg = to_config(parse(words), resolve_path("pkg://dapo.tiny/base"))
    rows = asyncio.run(measure(cfg, CYCLES, tokens=512))
    assert len(rows) == CYCLES
    total = torch.cuda.get_device_properties(0).total_memory
    for row in rows:
        assert row["difference"] <= 0.02
        assert row["free asleep"] - row["free awake"] >= 0.4 * total  # of 0.5 that the engine took, weights and cache
    asleep = [row["free asleep"] for row in rows]
    assert max(asleep) - min(asleep) <= 0.01 * total
