"""LoRA on one and two gloo ranks against peft in a plain transformers model; what leaves the actors has it merged."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from dapo.config.actor import LoraConfig
from tests.support.training.lora_ranks import (
    ALPHA,
    RANK,
    TARGETS,
    Ranks,
    adapters,
    assert_merged,
    base_weights,
    close,
    logprobs_of,
    plain_lora,
    reference_logprobs,
    sequences_of,
    shake,
    sharded_trainable,
    trained_logprobs,
    worst,
)
from tests.support.training.plain_reference import (
    LENGTHS,
    distance,
    full_gradients,
    full_weights,
    make_config,
    make_model,
    make_sequences,
    plain_loss,
    reference,
    train_batch,
)
from tests.support.training.plain_update import plain_update
from workers.actor import split_batch
from workers.training.unanimous import FilesError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module")
def untied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def start(ray_cluster: None, model_dir: Path) -> Iterator[Callable[..., Ranks]]:
    """start(ranks, ...): started once. Two ranks also checkpoint activations and free parameters after the forward."""
    started: dict[int, Ranks] = {}

    def get(
        ranks: int, model: Path = model_dir, *, kl: float = 0, dtype: str = "float32", rank: int = RANK, **actor: Any
    ) -> Ranks:
        cfg = make_config(model, num_workers=ranks, reshard_after_forward=ranks == 2, **actor)
        cfg.model.gradient_checkpointing = "full" if ranks == 2 else "none"
        cfg.model.dtype = dtype
        cfg.model.lora = LoraConfig(rank=rank, alpha=ALPHA, target_modules=TARGETS)
        cfg.algorithm.kl.loss_coeff = kl
        if ranks not in started:
            started[ranks] = Ranks(cfg)
        return started[ranks].build(cfg)

    yield get
    for one in started.values():
        one.close()


@pytest.mark.ray
@pytest.mark.parametrize(
    ("ranks", "tied", "actor", "lengths"),
    [
        pytest.param(1, True, {}, LENGTHS, id="one_rank"),
        pytest.param(2, True, {}, LENGTHS, id="two_ranks"),
        pytest.param(2, True, {"offload": "host"}, LENGTHS[:1], id="a_rank_without_sequences_offloaded"),
        pytest.param(2, False, {}, LENGTHS, id="a_frozen_embedding_is_a_unit_of_its_own"),
    ],
)
def test_logprobs_and_gradients_are_those_of_peft(
    start: Callable[..., Ranks],
    model_dir: Path,
    untied_dir: Path,
    ranks: int,
    tied: bool,
    actor: dict[str, Any],
    lengths: Sequence[tuple[int, int]],
) -> None:
    directory = model_dir if tied else untied_dir
    group = start(ranks, directory, **actor)
    plain = plain_lora(directory, group.all(shake)[0])
    sequences = make_sequences(directory, lengths)
    works = split_batch(train_batch(0, sequences), ranks, 25)
    for work, found in zip(works, group.all(trained_logprobs, works), strict=True):
        own = sequences_of(work)
        assert not own or close(found, logprobs_of(plain, own))

    plain_loss(plain, sequences).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for found in group.all(full_gradients, works):
        assert worst(found, wanted) <= 1e-5


@pytest.mark.ray
@pytest.mark.parametrize("ranks", [1, 2])
def test_update_with_a_reference_policy_is_that_of_plain_torch(
    start: Callable[..., Ranks], model_dir: Path, ranks: int
) -> None:
    """Clipping, weight decay and the KL to the base model act; the base itself stays bit for bit as in its file."""
    group = start(ranks, kl=0.3)
    plain = plain_lora(model_dir, group.all(shake)[0])
    sequences = make_sequences(model_dir, LENGTHS)
    rollout = [logprobs_of(plain, [s]).numpy() for s in sequences]
    sequences = tuple(dataclasses.replace(s, rollout_logprobs=r) for s, r in zip(sequences, rollout, strict=True))
    batch = train_batch(2, sequences[:3], sequences[3:])

    metrics = group.update(batch)
    expected = plain_update(plain, group.cfg, batch, reference(model_dir))
    assert metrics["actor/ref_kl"] == pytest.approx(expected["actor/ref_kl"], rel=1e-4) and metrics["actor/ref_kl"] > 0
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
    assert metrics["actor/loss"] == pytest.approx(expected["actor/loss"], abs=1e-5)
    found = group.all(adapters)[0]
    assert worst(found, {n: p.detach() for n, p in plain.named_parameters() if n in found}) <= 1e-5
    stored = load_file(model_dir / "model.safetensors")
    for base in group.all(base_weights):
        assert base.keys() == stored.keys()
        assert all(torch.equal(base[name], stored[name]) for name in stored)
    base = reference(model_dir)
    works = split_batch(train_batch(0, sequences), ranks, 64)
    for work, by_sequence in zip(works, group.all(reference_logprobs, works), strict=True):
        for sequence, own in zip(sequences_of(work), by_sequence, strict=True):
            assert close(own, logprobs_of(base, [sequence]))
    trainable, optimized = group.all(sharded_trainable)[0]
    assert trainable == optimized == found.keys()


@pytest.mark.ray
def test_bfloat16_base_with_float32_adapters(start: Callable[..., Ranks], model_dir: Path, tmp_path: Path) -> None:
    """What is frozen needs no master weights; what trains, is reduced or leaves for the engines is float32."""
    group = start(2, dtype="bfloat16")
    values = group.all(shake)[0]
    plain = plain_lora(model_dir, values)
    stored = {name: tensor.bfloat16() for name, tensor in load_file(model_dir / "model.safetensors").items()}
    sequences = make_sequences(model_dir, LENGTHS)
    plain_loss(plain, sequences).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    works = split_batch(train_batch(0, sequences), 2, 25)
    for gradients, base, weights in zip(
        group.all(full_gradients, works), group.all(base_weights), group.all(full_weights), strict=True
    ):
        assert 1e-4 <= distance(gradients, wanted) <= 0.1
        assert {t.dtype for t in (*gradients.values(), *weights.values(), *values.values())} == {torch.float32}
        assert all(torch.equal(base[name], stored[name]) for name in stored)
        assert_merged(weights, stored, values)
    group.call("export_hf", str(tmp_path / "hf"))
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], weights[name].bfloat16()) for name in stored)


@pytest.mark.ray
def test_first_update_moves_every_adapter_from_the_base_model(start: Callable[..., Ranks], model_dir: Path) -> None:
    """The first values of A do not depend on the number of ranks, and B is zero: the policy is the base model."""
    first = {ranks: start(ranks).all(adapters)[0] for ranks in (1, 2)}
    assert all(torch.equal(first[1][name], first[2][name]) for name in first[1])
    down = [tensor for name, tensor in first[1].items() if ".lora_A." in name]
    assert all(0 < float(a.abs().max()) <= a.shape[1] ** -0.5 for a in down)
    assert len({float(a.sum()) for a in down}) == len(down)
    assert not any(float(tensor.abs().max()) for name, tensor in first[1].items() if ".lora_B." in name)

    group = start(2)
    assert group.update(train_batch(0, make_sequences(model_dir, LENGTHS)))["actor/skipped_steps"] == 0
    group.update(train_batch(1, make_sequences(model_dir, LENGTHS, seed=1)))
    after = group.all(adapters)[0]
    assert [name for name in after if torch.equal(after[name], first[2][name])] == []


@pytest.mark.ray
def test_what_leaves_the_actors_is_merged(start: Callable[..., Ranks], model_dir: Path, tmp_path: Path) -> None:
    """Weight sync and export, for transformers and vLLM as they are; beside it the adapter for peft."""
    group = start(2)
    values = group.all(shake)[0]
    stored = load_file(model_dir / "model.safetensors")
    for weights in group.all(full_weights):
        assert_merged(weights, stored, values)

    group.call("export_hf", str(tmp_path / "hf"))
    sequences = make_sequences(model_dir, LENGTHS)
    works = split_batch(train_batch(0, sequences), 2, 96)
    exported = reference(tmp_path / "hf")
    alone = PeftModel.from_pretrained(reference(model_dir), tmp_path / "hf" / "adapter")
    for work, found in zip(works, group.all(trained_logprobs, works), strict=True):
        own = sequences_of(work)
        assert close(found, logprobs_of(exported, own)) and close(found, logprobs_of(alone, own))


@pytest.mark.ray
def test_state_of_adapters_continues_on_another_number_of_ranks(
    start: Callable[..., Ranks], model_dir: Path, tmp_path: Path
) -> None:
    group = start(2)
    batches = [train_batch(v, make_sequences(model_dir, LENGTHS, seed=v)) for v in range(2)]
    group.update(batches[0])
    group.call("save", str(tmp_path / "state"), 1)
    saved = group.checksum()
    group.update(batches[1])
    continued, values = group.checksum(), group.all(adapters)[0]
    group.call("load", str(tmp_path / "state"), 1)
    assert group.checksum() == saved != continued
    group.update(batches[1])
    assert group.checksum() == continued

    model = [
        n for n in FileSystemReader(tmp_path / "state").read_metadata().state_dict_metadata if "optimizer" not in n
    ]
    assert {name.removeprefix("model.model.") for name in model} == values.keys()
    for elsewhere in (start(1), start(2, fsdp_size=1)):
        elsewhere.call("load", str(tmp_path / "state"), 1)
        assert elsewhere.checksum() == saved
        elsewhere.update(batches[1])
        assert worst(elsewhere.all(adapters)[0], values) <= 1e-5


@pytest.mark.ray
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        pytest.param("model.lora.rank", 8, r"`model.lora.rank` \(3\) .* \(8\)", id="rank"),
        pytest.param("model.lora.alpha", 6.0, r"`model.lora.alpha` \(12.0\) .* \(6.0\)", id="alpha"),
        pytest.param(
            "model.lora.target_modules", ["a.k_proj"], r"\(q_proj, v_proj, down_proj\) .* \(k_proj\)", id="layers"
        ),
        pytest.param("model.path", "0" * 64, r"`model.path` \([0-9a-f]{64}\) differs", id="base"),
        pytest.param(None, None, r"whole model and no adapters .* `model.lora.rank=0`", id="no_adapters"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    start: Callable[..., Ranks], tmp_path: Path, key: str | None, value: Any, message: str
) -> None:
    group = start(1)
    group.call("save", str(tmp_path), 0)
    file = tmp_path / "lora.json"
    if key is None:
        file.unlink()
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(FilesError, match=message):
        group.call("load", str(tmp_path), 0)


@pytest.mark.ray
def test_a_checkpoint_of_adapters_is_no_model(start: Callable[..., Ranks], tmp_path: Path) -> None:
    start(1).call("save", str(tmp_path), 0)
    with pytest.raises(FilesError, match=r"adapters only \(lora.json\); set `model.lora` as"):
        start(1, rank=0).call("load", str(tmp_path), 0)
