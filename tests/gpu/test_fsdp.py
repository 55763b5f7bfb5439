"""One NCCL rank: loading, offloading to pinned host memory, selective checkpointing of the GPU's kernels, freeing."""

import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dapo.config.schema import Config
from dapo.workers.training import fsdp
from dapo.workers.training.files.loading import SINGLE_FILE
from dapo.workers.training.forward.policy import MicroBatch, PackedPolicy, collate
from dapo.workers.training.mesh import Mesh, arrange, join
from dapo.workers.training.optimizer import Moments, build_optimizer
from tests.support.training.plain_reference import LENGTHS, make_config, make_model, make_sequences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    join(DEVICE, rank=0, world_size=1, address="127.0.0.1", port=port, timeout_s=60)
    yield arrange(DEVICE, timeout_s=60, files_timeout_s=60, fsdp_size=-1, sequence_parallel_size=1)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="module")
def batch(model_dir: Path) -> MicroBatch:
    return collate(make_sequences(model_dir, LENGTHS), torch.device(DEVICE))


def configured(model_dir: Path, checkpointing: str = "none", **actor: Any) -> Config:
    cfg = make_config(model_dir, **actor)
    cfg.model.dtype, cfg.model.gradient_checkpointing = "bfloat16", checkpointing
    return cfg


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def gradients(policy: PackedPolicy, batch: MicroBatch) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    with Calls() as calls:
        policy(batch)[0].sum().backward()
    found = {name: p.grad.to_local().cpu().clone() for name, p in policy.model.named_parameters()}
    policy.zero_grad()
    return found, calls.count


@pytest.mark.parametrize("offload", ["none", "host"])
def test_every_weight_is_that_of_the_file(model_dir: Path, mesh: Mesh, offload: str) -> None:
    from safetensors.torch import load_file

    policy = fsdp.load_policy(configured(model_dir, offload=offload), mesh)
    stored = load_file(model_dir / SINGLE_FILE)
    for name, parameter in policy.model.named_parameters():
        assert parameter.device.type == ("cpu" if offload == "host" else DEVICE)
        assert parameter.to_local().is_pinned() == (offload == "host" and DEVICE == "cuda")
        assert torch.equal(parameter.to_local().cpu(), stored[name])
    assert {buffer.device.type for buffer in policy.buffers()} == {DEVICE}
    assert {name for name, full in fsdp.full_parameters(policy, mesh) if full.device.type == DEVICE} == stored.keys()


def test_offloading_changes_neither_gradients_nor_the_step(model_dir: Path, mesh: Mesh, batch: MicroBatch) -> None:
    found, after = [], []
    for offload in ("none", "host"):
        cfg = configured(model_dir, offload=offload, reshard_after_forward=True)
        policy = fsdp.load_policy(cfg, mesh)
        optimizer = build_optimizer(policy, cfg)
        found.append(gradients(policy, batch)[0])
        policy(batch)[0].sum().backward()
        assert {p.grad.device.type for p in policy.parameters()} == {"cpu" if offload == "host" else DEVICE}
        optimizer.step()
        after.append({name: full.cpu() for name, full in fsdp.full_parameters(policy, mesh)})
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() <= 1e-2 * gradient.norm(), name  # the kernels' sums have no order
        assert (after[1][name] - after[0][name]).abs().max() <= 1e-3, name


def test_moments_leave_the_gpu_between_updates_and_change_no_bit(
    model_dir: Path, mesh: Mesh, batch: MicroBatch
) -> None:
    cfg = configured(model_dir)
    policy = fsdp.load_policy(cfg, mesh)
    optimizer = build_optimizer(policy, cfg)
    moments = Moments(optimizer, DEVICE, moves=True)

    def state() -> dict[tuple[int, str], torch.Tensor]:
        named = enumerate(optimizer.state.values())
        return {(i, k): v.to_local() for i, each in named for k, v in each.items() if isinstance(v, DTensor)}

    used = torch.cuda.memory_allocated()
    for _ in range(3):
        with moments.on_device():
            assert {tensor.device.type for tensor in state().values()} == {DEVICE}
            assert torch.cuda.memory_allocated() > used
            policy(batch)[0].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            fsdp.reshard(policy)
            trained = {key: tensor.cpu() for key, tensor in state().items()}
        assert all(tensor.is_pinned() and torch.equal(tensor, trained[key]) for key, tensor in state().items())
        assert torch.cuda.memory_allocated() == used


def test_modes_of_checkpointing_agree_and_attention_is_kept(model_dir: Path, mesh: Mesh, batch: MicroBatch) -> None:
    attention = "torch_attn::_varlen_attn"
    wanted, plain = gradients(fsdp.load_policy(configured(model_dir), mesh), batch)
    again = {}
    for mode in ("selective", "full"):
        found, calls = gradients(fsdp.load_policy(configured(model_dir, mode), mesh), batch)
        again[mode] = calls[attention] - plain[attention]
        for name, gradient in wanted.items():
            assert (found[name] - gradient).norm() <= 1e-2 * gradient.norm(), (mode, name)
    assert plain[attention] == 2 and again == {"selective": 0, "full": 2}


def test_the_reference_waits_on_the_host_and_says_what_the_policy_says(
    model_dir: Path, mesh: Mesh, batch: MicroBatch
) -> None:
    cfg = configured(model_dir)
    policy = fsdp.load_policy(cfg, mesh)
    reference = fsdp.load_reference(cfg, mesh, policy)
    assert {(p.device.type, p.dtype) for p in reference.parameters()} == {("cpu", torch.bfloat16)}
    with torch.no_grad():
        assert torch.equal(policy(batch)[0], reference(batch)[0])


def test_engines_get_the_memory_between_phases(model_dir: Path, mesh: Mesh, batch: MicroBatch) -> None:
    cfg = configured(model_dir, reshard_after_forward=False)
    cfg.trainer.colocate = "time"
    policy = fsdp.load_policy(cfg, mesh)
    held = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    with torch.no_grad():
        policy(batch)
    del held
    before, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    fsdp.release(policy, cfg, mesh)
    assert before - torch.cuda.memory_reserved() >= 1 << 30
    assert torch.cuda.memory_allocated() < allocated  # what was gathered
