"""What the pool of actors does beside updates: bfloat16, export, order, bounds, deadlines."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo.workers.actor import split_batch
from dapo.workers.training.files import state
from tests.support.training.plain_reference import (
    CHECKPOINT_S,
    LENGTHS,
    UPDATE_S,
    distance,
    full_gradients,
    full_weights,
    make_config,
    make_model,
    make_sequences,
    on_all,
    plain_gradients,
    plain_logprobs,
    rank_here,
    rebuild,
    reference,
    start_pool,
    train_batch,
    update_here,
)


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(tmp_path_factory.mktemp(name), tied=name == "tied") for name in ("tied", "untied")}


@pytest.fixture(scope="module")
def rank(model_dirs: dict[str, Path]) -> Any:
    with rank_here(make_config(model_dirs["tied"], num_workers=1)) as worker:
        yield worker


def test_bfloat16_is_only_the_compute_type(rank: Any, model_dirs: dict[str, Path], tmp_path: Path) -> None:
    """Master weights, gradients and weight export stay float32; the Hugging Face export is in the compute type."""
    sequences = make_sequences(model_dirs["tied"], LENGTHS)
    plain = reference(model_dirs["tied"])
    cfg = make_config(model_dirs["tied"], num_workers=1)
    cfg.model.dtype = "bfloat16"
    rebuild(rank, cfg)
    gradients = full_gradients(rank, split_batch(train_batch(0, sequences), 1, 25)[0])
    assert 1e-4 <= distance(gradients, plain_gradients(plain, sequences)) <= 0.1
    weights = full_weights(rank)
    assert {t.dtype for t in (*gradients.values(), *weights.values())} == {torch.float32}
    assert distance(weights, {name: p.detach() for name, p in plain.named_parameters()}) == 0.0
    rank.export_hf(str(tmp_path / "hf"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert exported.dtype == torch.bfloat16
    assert torch.equal(exported.model.embed_tokens.weight, weights["model.embed_tokens.weight"].bfloat16())


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_export_loads_in_transformers_and_in_the_actors(
    rank: Any, model_dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    source = shutil.copytree(model_dirs[model], tmp_path / "source")
    # A temperature without `do_sample`: transformers reads it, and would not write it.
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.25}')
    monkeypatch.setattr(state, "EXPORT_FILE_BYTES", 16 << 10)
    cfg = make_config(source, num_workers=1, reshard_after_forward=True)
    cfg.model.gradient_checkpointing = "full"
    rebuild(rank, cfg)
    sequences = make_sequences(source, LENGTHS)
    update_here(rank, train_batch(0, sequences))
    rank.export_hf(str(tmp_path / "hf"))
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2 and max(file.stat().st_size for file in files) < 18 << 10

    exported, plain = reference(tmp_path / "hf"), reference(source)
    assert exported.config.tie_word_embeddings == (model == "tied")
    assert exported.config._attn_implementation == "sdpa" and exported.config.architectures == ["Qwen2ForCausalLM"]
    assert exported.generation_config.eos_token_id == [1, 2] and exported.generation_config.temperature == 0.25
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    weights = {name: tensor.clone() for name, tensor in full_weights(rank).items()}
    plain.load_state_dict(weights, strict=model == "untied")
    assert [name for name, p in plain.named_parameters() if torch.equal(p, before[name])] == []
    for sequence in sequences:
        assert torch.equal(plain_logprobs(exported, sequence), plain_logprobs(plain, sequence))
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "hf", source))
    assert ours.get_vocab() == theirs.get_vocab()
    rebuild(rank, make_config(tmp_path / "hf", num_workers=1))
    assert distance(full_weights(rank), weights) == 0.0


@pytest.mark.ray
def test_reference_logprobs_come_in_the_order_of_the_sequences(ray_cluster: None, model_dirs: dict[str, Path]) -> None:
    cfg = make_config(model_dirs["untied"], num_workers=2, max_tokens_per_gpu=48)
    cfg.algorithm.kl.reward_coeff = 0.1
    pool = start_pool(cfg)
    sequences = make_sequences(model_dirs["untied"], LENGTHS * 3, seed=5)
    found = asyncio.run(pool.reference_logprobs(sequences))
    for logprobs, sequence in zip(found, sequences, strict=True):
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, sequence.rollout_logprobs, atol=2e-5)
    with pytest.raises(ValueError, match=r"`actor.max_tokens_per_gpu` x .* \(48\) .* 65 tokens"):
        asyncio.run(pool.update(train_batch(0, make_sequences(model_dirs["untied"], [(40, 25)]))))


def timeouts(worker: Any) -> set[float]:
    """Runs on a rank: of all its process groups, in seconds."""
    import torch.distributed as dist

    groups = dist.distributed_c10d._world.pg_map
    assert len(groups) >= 5, "all ranks, again for files, copies, shards, and those that share a sequence"
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    return {backend.options._timeout.total_seconds() for backend in backends}


@pytest.mark.ray
def test_every_process_group_has_the_deadline_of_an_update_or_of_a_checkpoint(
    ray_cluster: None, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """Those that FSDP, the optimizer or a checkpoint may have made too."""
    model = model_dirs["untied"]
    pool = start_pool(make_config(model, num_workers=4, fsdp_size=2, ulysses_sequence_parallel_size=2))
    asyncio.run(pool.update(train_batch(0, make_sequences(model, LENGTHS))))
    asyncio.run(pool.save(str(tmp_path / "state"), 1))
    asyncio.run(pool.load(str(tmp_path / "state"), 1))
    asyncio.run(pool.export_hf(str(tmp_path / "hf")))
    assert on_all(pool, timeouts) == [{UPDATE_S, CHECKPOINT_S}] * 4
