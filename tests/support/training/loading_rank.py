"""One rank that loads a model: `python -m tests.support.training.loading_rank MODEL RANK RANKS FSDP_SIZE PORT`.

Out: one line of JSON, bytes: growth of the resident set at its peak and in the end, and of this rank's shards.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.support.training.plain_reference import make_config
from workers.training.fsdp import load_policy
from workers.training.mesh import arrange, join


def resident(field: str) -> int:
    """VmRSS, or VmHWM (its peak), bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def main(model: str, rank: int, ranks: int, fsdp_size: int, port: int) -> None:
    torch.set_num_threads(1)
    tiny = Qwen2Config(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    AutoModelForCausalLM.from_config(tiny)  # imports what loading imports
    join("cpu", rank=rank, world_size=ranks, address="127.0.0.1", port=port, timeout_s=200)
    mesh = arrange("cpu", timeout_s=200, files_timeout_s=200, fsdp_size=fsdp_size, sequence_parallel_size=1)
    cfg = make_config(Path(model), num_workers=ranks)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    policy = load_policy(cfg, mesh)
    peak, after = resident("VmHWM") - before, resident("VmRSS") - before

    shards = 0
    files = [safe_open(file, "pt") for file in sorted(Path(model).glob("*.safetensors"))]
    stored = {name: file for file in files for name in file.keys()}
    for name, parameter in policy.model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.dtype == torch.float32
        local = parameter.to_local()
        shards += local.nbytes
        rows = -(-len(parameter) // fsdp_size)
        wanted = stored[name].get_tensor(name)[rank % fsdp_size * rows :][:rows]
        assert torch.equal(local, wanted.float()), name
    print(json.dumps({"peak": peak, "after": after, "shards": shards}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
