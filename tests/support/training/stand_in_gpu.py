"""The second of two ranks on a GPU that is not there: `python -m tests.support.training.stand_in_gpu MODEL`.

torch lets a device be registered in Python, and computes on it with tensors that have device, type and shape and no
values. What a rank does runs as it would with CUDA, kernels for packed sequences included. An operation on tensors of
two devices raises, and so does one that reads a value, for which the host would wait. Prints a JSON line per case, or
ends with the error.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from dapo.workers.training import fsdp, update
from dapo.workers.training.forward import attention, logprobs
from dapo.workers.training.mesh import Mesh, SequenceParallel
from dapo.workers.training.optimizer import Moments, build_optimizer
from dapo.workers.training.update_metrics import STALENESS_BUCKETS, Mismatch, Totals
from tests.support.training.plain_reference import LENGTHS, make_config, make_sequences

NAME = "standin"
CASES = [("none", 4, 2), ("phase", 0, 1), ("host", 0, 2)]  # actor.offload, model.lora.rank, ranks of a sequence
VARLEN: list[Any] = []  # calls of the GPU's kernel for packed sequences


class Cuda(str):
    """The device's name, which the product takes for `cuda`."""

    def __eq__(self, other: object) -> bool:
        return other in (NAME, "cuda")

    __hash__ = str.__hash__


class Stream:
    """A stream or event, on which all that is asked for has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    wait_event = wait_stream = wait

    def record_event(self, *args: Any) -> "Stream":
        return self


class Module(_DummyBackendModule):
    """What `torch.cuda` is for CUDA."""

    Stream = Event = Stream

    def current_stream(self, *args: Any) -> Stream:
        return Stream()

    def stream(self, stream: Stream) -> nullcontext[None]:
        return nullcontext()


def stand_in() -> torch.device:
    """Registers the device, and lets the product take it for CUDA's."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    torch.Tensor.is_cuda = property(lambda tensor: tensor.device.type == NAME)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args: None
    registered = SimpleNamespace(cudaHostRegister=lambda *args: 0)
    torch.cuda.cudart = lambda: registered
    logprobs.LOGITS_CHUNK_ELEMENTS[NAME] = 1 << 9  # several chunks
    return torch.device(NAME, 0)


def without_values(fake: FakeTensorMode, device: torch.device) -> None:
    """Replaces what needs values: files, digests, and decisions on totals."""

    def to_empty(policy: nn.Module, device: str) -> None:
        where = torch.device("cpu") if device == "cpu" else torch.device(NAME, 0)  # `cpu` is no Cuda
        for module in policy.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device=where)
            if not isinstance(module, FSDPModule):
                continue
            for parameter in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
                size, dtype = parameter.padded_sharded_param_size, parameter.sharded_param.dtype
                data = torch.zeros(size, dtype=dtype, device=where)
                shard = parameter.to_sharded_dtensor(data.narrow(0, 0, parameter.sharded_size[0]))
                parameter._sharded_param_data = data.view(-1)
                parameter.sharded_param = nn.Parameter(shard, requires_grad=parameter.sharded_param.requires_grad)
                parameter._setattr_on_modules(parameter.sharded_param)

    def outside(build: Any) -> Any:
        def built(*args: Any) -> Any:
            with unset_fake_temporarily():
                return build(*args)

        return built

    def gather(rows: Any) -> Totals:
        assert torch.stack(list(rows)).device == device
        nothing = Mismatch(**dict.fromkeys((field.name for field in fields(Mismatch)), 0.0))
        return Totals(defaultdict(lambda: 1.0), (nothing,) * STALENESS_BUCKETS, 0.0)

    fsdp.PackedPolicy.to_empty = to_empty
    fsdp._on_meta, fsdp.add_adapters = outside(fsdp._on_meta), outside(fsdp.add_adapters)
    fsdp.load_buffers = fsdp.load_parameters = fsdp.init_adapters = lambda *args: None
    fsdp.CPUOffloadPolicy = lambda pin_memory: CPUOffloadPolicy(pin_memory=False)
    update.gather = gather
    kernel = attention._varlen

    def varlen(*args: Any, **options: Any) -> torch.Tensor:
        VARLEN.append(args)
        return kernel(*args, **options)

    attention._varlen = varlen
    read, make = torch.from_numpy, torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        if getattr(device, "type", device) == NAME:  # torch would compute a constant there
            given = make(data, **options)
            return torch.empty(given.shape, dtype=given.dtype, device=device)
        return make(data, device=device, **options)

    torch.tensor, torch.from_numpy = tensor, lambda array: fake.from_tensor(read(array))


def run(case: tuple[str, int, int], model: Path, sequences: Any, shards: DeviceMesh) -> dict[str, Any]:
    """Loads, updates, puts the moments away and gathers weights; returns which devices hold what."""
    offload, rank, size = case
    cfg = make_config(model, offload=offload, num_workers=2)
    cfg.model.dtype, cfg.model.lora.rank, cfg.trainer.colocate = "bfloat16", rank, "time"
    cfg.algorithm.entropy_coeff = cfg.algorithm.kl.loss_coeff = 0.1
    cfg.algorithm.policy_loss = "gspo"
    cfg.model.head_dtype = "float32" if offload == "none" else "auto"
    world = dist.group.WORLD
    shared = SequenceParallel(1, size, world) if size > 1 else SequenceParallel()
    mesh = Mesh(Cuda(NAME), 1, 2, shards, shared, world)
    policy = fsdp.load_policy(cfg, mesh)
    optimizer = build_optimizer(policy, cfg)
    moments = Moments(optimizer, mesh.device, moves=offload == "phase")
    reference = fsdp.load_reference(cfg, mesh, policy)
    updater = update.Updater(policy, reference, optimizer, cfg, mesh)
    between = held(optimizer)
    with moments.on_device():
        during = held(optimizer)
        updater.update(0, [[sequences[:3], sequences[3:]], [sequences[:2], []]], (0, 1))
    fsdp.release(policy, cfg, mesh)
    full = fsdp.full_parameters(policy, mesh, torch.bfloat16)
    return {
        "case": case,
        "buffers": types(policy.buffers()),
        "shards": types(parameter.to_local() for parameter in policy.parameters()),
        "reference": types(parameter.to_local() for parameter in reference.parameters()),
        "full": types(tensor for _, tensor in full),
        "varlen": len(VARLEN),
        "moments": [between, during, held(optimizer)],
    }


def held(optimizer: torch.optim.Optimizer) -> list[str]:
    """Where Adam's moments are."""
    return types(value for state in optimizer.state.values() for name, value in state.items() if "exp" in name)


def types(tensors: Iterable[torch.Tensor]) -> list[str]:
    """The types of device that hold them."""
    return sorted({tensor.device.type for tensor in tensors})


def main() -> None:
    model = Path(sys.argv[1])
    sequences = make_sequences(model, LENGTHS)
    device = stand_in()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    assert dist.group.WORLD is not None
    shards = DeviceMesh.from_group(dist.group.WORLD, NAME, mesh_dim_names=("shard",))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    without_values(fake, device)
    for case in CASES:
        with fake:
            print(json.dumps(run(case, model, sequences, shards)), flush=True)


if __name__ == "__main__":
    main()
