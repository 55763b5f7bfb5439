"""Copies of the parameters side by side (HSDP), offloading, and files that fit any arrangement of the ranks.

Four gloo ranks; they are built anew for each arrangement. Gradients are compared in test_parity.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from dapo.config.actor import OptimConfig
from dapo.config.schema import Config
from dapo.pools import ActorsLost
from tests.support.training.fsdp_ranks import counted, memory, travelling
from tests.support.training.plain_reference import (
    LENGTHS,
    distance,
    full_weights,
    make_config,
    make_model,
    make_sequences,
    on_all,
    rank_checksum,
    rebuild,
    save,
    start_pool,
    train_batch,
    update,
)
from workers.actor import ActorPool, split_batch
from workers.training.files import state
from workers.training.fsdp import load_policy, load_reference

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

RANKS = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_model(tmp_path_factory.mktemp("model"), tied=False)
    # A temperature without `do_sample`: transformers reads it, and would not write it.
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.25}')
    return directory


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


def test_copies_train_alike_and_as_one_sharded_copy_does(pool: ActorPool, model_dir: Path) -> None:
    build(pool, model_dir)
    [initial] = checksums(pool)
    norm = train(pool, model_dir, 0)["actor/grad_norm"]
    wanted = weights(pool)

    build(pool, model_dir, fsdp_size=2)
    first, second, third, fourth = on_all(pool, layout)
    assert first == third and second == fourth and "Replicate" in first[0] and "Shard" in first[0]
    assert first[1]["model.embed_tokens.weight"] == (32, 32)
    assert checksums(pool) == {initial}
    assert train(pool, model_dir, 0)["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert len(checksums(pool)) == 1
    before = dict(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).named_parameters())
    moved, wanted_move = (
        {name: tensor - before[name].detach() for name, tensor in each.items()} for each in (weights(pool), wanted)
    )
    assert distance(moved, wanted_move) <= 1e-3


def test_copies_add_up_their_gradients_once(pool: ActorPool, model_dir: Path) -> None:
    """Whatever the number of micro-batches, unless they are offloaded."""
    batch = train_batch(0, make_sequences(model_dir, LENGTHS))
    found: dict[tuple[int, str], int] = {}
    after: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for max_tokens, offload in ((64, "none"), (21, "none"), (21, "host")):
        build(pool, model_dir, max_tokens=max_tokens, offload=offload, fsdp_size=2, reshard_after_forward=True)
        answers = on_all(pool, counted, split_batch(batch, RANKS, max_tokens))
        [(micro_batches, calls, _)] = set(answers)
        assert micro_batches == (1 if max_tokens == 64 else 2)
        found[max_tokens, offload], after[max_tokens, offload] = calls, weights(pool)
    units = 4  # two layers, embedding, root
    assert found == {(64, "none"): units, (21, "none"): units, (21, "host"): 2 * units}
    assert distance(after[21, "none"], after[64, "none"]) <= 1e-5
    assert distance(after[21, "host"], after[64, "none"]) <= 1e-5


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
    train(pool, model_dir, 0)
    save(pool, tmp_path / "copies")
    [saved] = checksums(pool)
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


def optimizer_settings(worker: Any) -> dict[str, Any]:
    """Runs on a rank."""
    [group] = worker._optimizer.param_groups
    return {key: group[key] for key in ("betas", "eps", "weight_decay", "fused")}


def test_a_checkpoint_leaves_the_settings_of_the_optimizer(pool: ActorPool, model_dir: Path, tmp_path: Path) -> None:
    build(pool, model_dir)
    save(pool, tmp_path / "state")
    build(pool, model_dir, optim=OptimConfig(betas=[0.5, 0.75], weight_decay=0.5))
    wanted = on_all(pool, optimizer_settings)
    asyncio.run(pool.load(str(tmp_path / "state"), 1))
    assert on_all(pool, optimizer_settings) == wanted and wanted[0]["betas"] == (0.5, 0.75)


def test_an_export_of_copies_in_several_files(pool: ActorPool, model_dir: Path, tmp_path: Path) -> None:
    build(pool, model_dir, fsdp_size=2)
    train(pool, model_dir, 0)
    on_all(pool, limit_files, [16 << 10] * RANKS)
    try:
        asyncio.run(pool.export_hf(str(tmp_path / "hf")))
    finally:
        on_all(pool, limit_files, [4 << 30] * RANKS)
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2 and max(file.stat().st_size for file in files) < 18 << 10
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert not exported.config.tie_word_embeddings and exported.config.architectures == ["Qwen2ForCausalLM"]
    assert exported.generation_config.eos_token_id == [1, 2] and exported.generation_config.temperature == 0.25
    found = weights(pool)
    assert [name for name, p in exported.named_parameters() if not torch.equal(p, found[name])] == []

    cfg = make_config(tmp_path / "hf", num_workers=RANKS, fsdp_size=2)
    on_all(pool, rebuild, [cfg] * RANKS)  # the actors read several files
    assert distance(weights(pool), found) == 0.0


def limit_files(worker: Any, size: int) -> None:
    """Runs on a rank: bytes of one exported file."""
    state.EXPORT_FILE_BYTES = size


@pytest.mark.parametrize("reshard", [True, False])
def test_offloading_changes_no_bit_and_nothing_gathered_stays(pool: ActorPool, model_dir: Path, reshard: bool) -> None:
    found = []
    for offload in ("none", "host"):
        build(pool, model_dir, offload=offload, fsdp_size=2, reshard_after_forward=reshard)
        train(pool, model_dir, 0)
        found.append(checksums(pool))
        for types, devices, policies, gradients, gathered in on_all(pool, memory):
            assert types == {DTensor.__name__} and devices == {"cpu"} and gradients == 0 and gathered == 0
            assert {issubclass(each, CPUOffloadPolicy) for each in policies} == {offload == "host"}
    assert found[0] == found[1] and len(found[0]) == 1


def reference_against_policy(worker: Any, sequences: tuple[Any, ...]) -> tuple[set[torch.dtype], float, float]:
    """Runs on a rank: stored types of the reference, mean |log-probability|, largest difference from the policy's."""
    from workers.training.update import Updater

    reference = load_reference(worker._cfg, worker._mesh, worker._policy)
    updater = Updater(worker._policy, reference, worker._optimizer, worker._cfg, worker._mesh)
    batch = updater._collate(sequences)
    [[theirs]], ([[own]], _) = updater._reference_of([[batch]]), updater._before([[batch]])
    types = {p.dtype for p in reference.parameters()}
    return types, float(own.abs().mean()), float((own - theirs).abs().max())


def test_the_reference_is_stored_in_the_compute_type_and_says_the_same(pool: ActorPool, model_dir: Path) -> None:
    build(pool, model_dir, dtype="bfloat16", fsdp_size=2)
    sequences = make_sequences(model_dir, LENGTHS)
    for types, size, difference in on_all(pool, reference_against_policy, [sequences] * RANKS):
        assert types == {torch.bfloat16} and size > 0.1 and difference == 0.0


def test_files_of_another_model_are_refused_by_all_ranks(pool: ActorPool, model_dir: Path, tmp_path: Path) -> None:
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 40'))
    cfg = make_config(tmp_path, num_workers=RANKS)
    for found in on_all(pool, refused, [cfg] * RANKS):
        assert "has shape [48, 32], and config.json asks for [40, 32]" in found


def refused(worker: Any, cfg: Config) -> str:
    """Runs on a rank."""
    try:
        load_policy(cfg, worker._mesh)
    except ValueError as error:
        return str(error)
    return "loaded"
