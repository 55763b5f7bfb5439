"""Copies of the parameters side by side (HSDP), offloading, and files that fit any arrangement of four ranks.

Gradients are compared in test_parity.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config

from dapo.config.schema import Config
from dapo.pools import ActorsLost
from dapo.workers.actor import ActorPool, split_batch
from dapo.workers.training.fsdp import load_policy
from tests.support.training.plain_reference import (
    LENGTHS,
    distance,
    full_weights,
    make_config,
    make_sequences,
    on_all,
    rank_checksum,
    rebuild,
    save,
    start_pool,
    train_batch,
    update,
    update_on,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

RANKS = 4


@pytest.fixture(scope="module")
def pool(ray_cluster: None, model_dir: Path) -> ActorPool:
    return start_pool(make_config(model_dir, num_workers=RANKS))


def build(pool: ActorPool, model_dir: Path, dtype: str = "float32", max_tokens: int = 64, **actor: Any) -> None:
    cfg = make_config(model_dir, num_workers=RANKS, **actor)
    cfg.model.dtype, cfg.actor.max_tokens_per_gpu = dtype, max_tokens
    on_all(pool, rebuild, [cfg] * RANKS)


def checksums(pool: ActorPool) -> set[str]:
    """Returns the checksum of each rank's copy."""
    return set(on_all(pool, rank_checksum))


def train(pool: ActorPool, model_dir: Path, seed: int) -> dict[str, float]:
    return update(pool, train_batch(seed, make_sequences(model_dir, LENGTHS, seed)))


def weights(pool: ActorPool) -> dict[str, torch.Tensor]:
    return on_all(pool, full_weights)[0]


def layout(worker: Any) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Runs on a rank: placements and local shapes."""
    parameters = dict(worker._policy.model.named_parameters())
    [placements] = {str(p.placements) for p in parameters.values()}
    return placements, {name: tuple(p.to_local().shape) for name, p in parameters.items()}


class Travelling(TorchDispatchMode):
    """Types of the tensors in each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            seen = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            self.types.setdefault(func._opname, set()).update(seen)
        return func(*args, **(kwargs or {}))


def travelling(worker: Any, work: Any) -> dict[str, set[torch.dtype]]:
    """Runs on a rank."""
    with Travelling() as seen:
        update_on(worker, work)
    return seen.types


def test_parameters_travel_in_the_compute_type_and_gradients_in_float32(pool: ActorPool, model_dir: Path) -> None:
    build(pool, model_dir, dtype="bfloat16", max_tokens=21, fsdp_size=2, reshard_after_forward=True)
    works = split_batch(train_batch(0, make_sequences(model_dir, LENGTHS)), RANKS, 21)
    for types in on_all(pool, travelling, works):
        assert types["_allgather_base_"] == {torch.bfloat16}
        assert types["_reduce_scatter_base_"] == types["allreduce_"] == {torch.float32}


def disturb(worker: Any) -> None:
    """Runs on a rank: changes the last bit of one weight in the second copy."""
    if worker._mesh.rank == 3:
        local = worker._policy.model.get_parameter("model.norm.weight").detach().to_local()
        local[-1:] = torch.nextafter(local[-1:], torch.tensor(9.0))


def test_copies_that_drifted_apart_are_found_before_anything_is_saved(
    pool: ActorPool, model_dir: Path, tmp_path: Path
) -> None:
    own = start_pool(make_config(model_dir, num_workers=RANKS, fsdp_size=2))  # the same ranks
    save(own, tmp_path / "whole")
    on_all(own, disturb)
    for _ in range(2):
        with pytest.raises(ActorsLost, match=r"RuntimeError: the parameters of actor ranks \[3\] differ .* drifted"):
            save(own, tmp_path / "drifted")
    assert [each.name for each in tmp_path.iterdir()] == ["whole"]


def test_a_checkpoint_fits_any_arrangement(pool: ActorPool, model_dir: Path, tmp_path: Path) -> None:
    build(pool, model_dir, fsdp_size=2)
    first, second, third, fourth = on_all(pool, layout)
    assert first == third and second == fourth and "Replicate" in first[0] and "Shard" in first[0]
    assert first[1]["model.embed_tokens.weight"] == (32, 32)
    train(pool, model_dir, 0)
    save(pool, tmp_path / "copies")
    [saved] = checksums(pool)  # copies train alike
    train(pool, model_dir, 1)
    wanted = weights(pool)

    for place, arrangement in (("one", {}), ("none", {"fsdp_size": 1}), ("host", {"offload": "host"})):
        build(pool, model_dir, **arrangement)
        asyncio.run(pool.load(str(tmp_path / "copies"), 1))
        assert checksums(pool) == {saved}
        save(pool, tmp_path / place)
        train(pool, model_dir, 1)  # by the optimizer's state that was saved
        assert distance(weights(pool), wanted) <= 1e-6
    sizes = {each.name: sum(file.stat().st_size for file in each.iterdir()) for each in tmp_path.iterdir()}
    assert sizes["none"] < sizes["copies"] < sizes["one"]  # copies are not stored; each part costs some bytes


def memory(worker: Any) -> tuple[set[type], set[str], set[type], int, int]:
    """Runs on a rank: types of the parameters that the modules show, devices of all state, offload policies, gradients
    that are held, bytes of gathered parameters."""
    policy = worker._policy
    shown = list(policy.parameters())
    state = [value for each in worker._optimizer.state.values() for value in each.values()]
    groups = [m._get_fsdp_state()._fsdp_param_group for m in policy.modules() if isinstance(m, FSDPModule)]
    whole = [p._unsharded_param for g in groups for p in g.fsdp_params if hasattr(p, "_unsharded_param")]
    return (
        {type(p.data) for p in shown},
        {str(tensor.device) for tensor in (*shown, *state)},
        {type(group.offload_policy) for group in groups},
        sum(p.grad is not None for p in shown),
        sum(tensor.untyped_storage().nbytes() for tensor in whole),
    )


def test_offloading_changes_no_bit_and_nothing_gathered_stays(pool: ActorPool, model_dir: Path) -> None:
    found = []
    for offload in ("none", "host"):
        build(pool, model_dir, offload=offload, fsdp_size=2, reshard_after_forward=False)
        train(pool, model_dir, 0)
        found.append(checksums(pool))
        for types, devices, policies, gradients, gathered in on_all(pool, memory):
            assert types == {DTensor} and devices == {"cpu"} and gradients == 0 and gathered == 0
            assert {issubclass(each, CPUOffloadPolicy) for each in policies} == {offload == "host"}
    assert found[0] == found[1] and len(found[0]) == 1


def large_model(directory: Path) -> int:
    """Random weights in bfloat16, several files; not all dimensions divide by 2. Returns the bytes in float32."""
    sizes = {"hidden_size": 512, "intermediate_size": 1401, "num_hidden_layers": 8, "vocab_size": 32001}
    config = Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=False)
    with torch.device("meta"):
        parameters = list(AutoModelForCausalLM.from_config(config).named_parameters())
    weight_map: dict[str, str] = {}
    for number, start in enumerate(range(0, len(parameters), 20)):
        tensors = {name: torch.randn(p.shape, dtype=torch.bfloat16) for name, p in parameters[start : start + 20]}
        save_file(tensors, directory / f"model-{number}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(directory)
    return 4 * sum(p.numel() for _, p in parameters)


def resident(field: str) -> int:
    """VmRSS, or VmHWM (its peak), bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def loading(worker: Any, cfg: Config) -> tuple[int, int, int]:
    """Runs on a rank: bytes of its shards, growth of the resident set (mapped files included) at its peak and in the
    end. Compares its rows with the files'."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    policy = load_policy(cfg, worker._mesh)
    peak, after = resident("VmHWM") - before, resident("VmRSS") - before
    files = [safe_open(file, "pt") for file in sorted(Path(cfg.model.path).glob("*.safetensors"))]
    stored = {name: file for file in files for name in file.keys()}
    shards = 0
    for name, parameter in policy.model.named_parameters():
        local = parameter.to_local()
        shards += local.nbytes
        rows = -(-len(parameter) // 2)
        assert torch.equal(local, stored[name].get_tensor(name)[worker._rank * rows :][:rows].float()), name
    return shards, peak, after


def test_no_rank_ever_holds_more_than_its_shard(ray_cluster: None, model_dir: Path, tmp_path: Path) -> None:
    whole = large_model(tmp_path)
    pool = start_pool(make_config(model_dir, num_workers=2))
    largest_slice, few = 32001 * 512 * 4 // 2, 24 << 20
    for shards, peak, after in on_all(pool, loading, [make_config(tmp_path, num_workers=2)] * 2):
        assert shards == pytest.approx(whole / 2, rel=0.01)
        assert 0.8 * shards <= after <= shards + few, "what was measured is the loading"
        assert peak <= shards + largest_slice + few
