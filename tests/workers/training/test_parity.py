"""Log-probabilities and gradients of the ranks against plain transformers, however ranks and memory are arranged.

The ranks are built anew for each variant of each row of (ranks, sequence parallel size).
"""

import dataclasses
import itertools
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from dapo.config.actor import LoraConfig
from dapo.config.algorithm import AlgorithmConfig, KLConfig, RolloutCorrectionConfig
from dapo.config.schema import Config
from dapo.types import TrainBatch, TrainSequence
from tests.support.training.model_families import FAMILIES, save_model
from tests.support.training.plain_reference import (
    LENGTHS,
    VOCABULARY,
    in_turns,
    make_config,
    make_model,
    make_sequences,
    on_all,
    plain_logprobs,
    plain_loss,
    rebuild,
    reference,
    start_pool,
    train_batch,
)
from tests.support.training.plain_update import assert_update, mismatched
from workers.actor import ActorPool, RankWork, split_batch
from workers.training.lora import add_adapters, is_adapter

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

BOUND = 1e-5
CHUNK_ROWS = 3
# Prompts and responses of many lengths, more tokens than any number of ranks divides.
SEQUENCES = (*LENGTHS, (9, 40), (1, 1), (30, 2), (2, 33))


@dataclasses.dataclass(frozen=True)
class Variant:
    """packed: all sequences in as few micro-batches as there are ranks, else one each. chunked: logits three rows at a
    time. lora: adapters train, else all weights. offload, checkpointing: see `ActorConfig` and `ModelConfig`."""

    packed: bool = True
    chunked: bool = False
    offload: bool = False
    lora: bool = False
    checkpointing: str = "none"


# Every pair of the first four choices occurs.
VARIANTS = [
    pytest.param(Variant(), id="packed_full"),
    pytest.param(Variant(chunked=True, offload=True, lora=True), id="packed_chunked_offload_lora"),
    pytest.param(Variant(packed=False, offload=True, lora=True, checkpointing="full"), id="separate_offload_lora"),
    pytest.param(Variant(packed=False, chunked=True, lora=True, checkpointing="selective"), id="separate_chunked_lora"),
    pytest.param(Variant(packed=False, chunked=True, offload=True), id="separate_chunked_offload"),
]
LORA = LoraConfig(rank=3, alpha=6.0)
ROWS = [(1, 1), (2, 1), (2, 2), (4, 2)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def sequences(model_dir: Path) -> tuple[TrainSequence, ...]:
    return in_turns(make_sequences(model_dir, SEQUENCES, seed=3))


@dataclasses.dataclass(frozen=True)
class Plain:
    """One sequence at a time, in one process. logprobs: [R] of each sequence. gradients: of the whole mini-batch, by
    name, for what trains."""

    logprobs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def plain(model_dir: Path, sequences: tuple[TrainSequence, ...]) -> dict[bool, Plain]:
    """Returns the plain results without and with adapters."""
    return {lora: plain_results(model_dir, sequences, lora=lora) for lora in (False, True)}


def plain_results(model_dir: Path, sequences: tuple[TrainSequence, ...], *, lora: bool) -> Plain:
    model = reference(model_dir)
    if lora:
        add_adapters(model, LORA)
        set_adapters(model)
    with torch.no_grad():
        logprobs = [plain_logprobs(model, sequence) for sequence in sequences]
    plain_loss(model, sequences).backward()
    return Plain(logprobs, gradients_of(model))


def set_adapters(model: torch.nn.Module) -> None:
    """The same values on any number of ranks, B among them, without which A has no gradient."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            full = 0.2 * torch.randn(parameter.shape, generator=generator)
            with torch.no_grad():
                if isinstance(parameter, DTensor):
                    full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.copy_(full)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def row_name(row: tuple[int, int]) -> str:
    return f"{row[0]}_ranks_{row[1]}_share"


@pytest.fixture(scope="module", params=ROWS, ids=row_name)
def row(request: pytest.FixtureRequest, ray_cluster: None, model_dir: Path) -> tuple[ActorPool, Config]:
    ranks, shared_by = request.param
    cfg = make_config(model_dir, num_workers=ranks, ulysses_sequence_parallel_size=shared_by)
    return start_pool(cfg), cfg


def configured(cfg: Config, variant: Variant, **actor: Any) -> Config:
    lora = LORA if variant.lora else LoraConfig()
    model = dataclasses.replace(cfg.model, gradient_checkpointing=variant.checkpointing, lora=lora)
    reshard = variant.checkpointing == "full"
    actor_cfg = dataclasses.replace(
        cfg.actor, offload="host" if variant.offload else "none", reshard_after_forward=reshard, **actor
    )
    return dataclasses.replace(cfg, model=model, actor=actor_cfg)


def micro_batches(sequences: tuple[TrainSequence, ...], cfg: Config, packed: bool) -> list[RankWork]:
    """One share per group of ranks; unpacked, a sequence to each micro-batch, of which the last may be empty."""
    groups = cfg.actor.num_workers // cfg.actor.ulysses_sequence_parallel_size
    if packed:
        return split_batch(train_batch(0, sequences), groups, sum(len(s.token_ids) for s in sequences))
    rounds = [sequences[i : i + groups] for i in range(0, len(sequences), groups)]
    return [
        RankWork(version=0, minibatches=(tuple(each[group : group + 1] for each in rounds),), order=(0,))
        for group in range(groups)
    ]


Found = tuple[list[list[torch.Tensor]], dict[str, torch.Tensor], float]


def measure(worker: Any, cfg: Config, chunk_elements: int, work: RankWork) -> Found:
    """Runs on a rank: builds everything anew; log-probabilities by micro-batch and sequence, gradients and their norm.

    The optimizer's own step is left out: the gradient is what parity is about.
    """
    from workers.training.forward import logprobs

    whole = dict(logprobs.LOGITS_CHUNK_ELEMENTS)
    logprobs.LOGITS_CHUNK_ELEMENTS["cpu"] = chunk_elements
    try:
        rebuild(worker, cfg)
        set_adapters(worker._policy.model)
        updater = worker._updater
        batches = [updater._collate(sequences) for sequences in work.minibatches[0]]
        [own], _ = updater._before([batches])
        totals = updater._forward_backward(batches, None, None)
    finally:
        logprobs.LOGITS_CHUNK_ELEMENTS.update(whole)
    gradients = gradients_of(worker._policy.model)
    lengths = [[len(s.rollout_logprobs) for s in sequences] for sequences in work.minibatches[0]]
    return [list(one.split(of)) for one, of in zip(own, lengths, strict=True)], gradients, totals.grad_norm


def assert_parity(
    pool: ActorPool, cfg: Config, variant: Variant, sequences: tuple[TrainSequence, ...], wanted: Plain
) -> None:
    ranks, shared_by = cfg.actor.num_workers, cfg.actor.ulysses_sequence_parallel_size
    works = micro_batches(sequences, cfg, variant.packed)
    assert len({len(work.minibatches[0]) for work in works}) == 1
    chunk = CHUNK_ROWS * VOCABULARY if variant.chunked else 1 << 24
    shares = [works[rank // shared_by] for rank in range(ranks)]
    found = on_all(pool, measure, [cfg] * ranks, [chunk] * ranks, shares)
    by_tokens = dict(zip([s.token_ids.tobytes() for s in sequences], wanted.logprobs, strict=True))
    norm = torch.cat([g.double().flatten() for g in wanted.gradients.values()]).norm()
    seen = 0
    for (logprobs, gradients, grad_norm), work in zip(found, shares, strict=True):
        for sequence, own in zip(
            itertools.chain.from_iterable(work.minibatches[0]), itertools.chain.from_iterable(logprobs), strict=True
        ):
            assert (own - by_tokens[sequence.token_ids.tobytes()]).abs().max() <= BOUND
            seen += 1
        assert gradients.keys() == wanted.gradients.keys()
        distances = {
            name: float((gradients[name] - gradient).norm() / gradient.norm())
            for name, gradient in wanted.gradients.items()
        }
        assert {name: distance for name, distance in distances.items() if not distance <= BOUND} == {}
        assert grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert seen == shared_by * len(sequences)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_agree_with_plain_transformers(
    row: tuple[ActorPool, Config],
    variant: Variant,
    sequences: tuple[TrainSequence, ...],
    plain: dict[bool, Plain],
) -> None:
    pool, cfg = row
    assert_parity(pool, configured(cfg, variant), variant, sequences, plain[variant.lora])
    if cfg.actor.num_workers == 4:
        # Copies of the parameters side by side; and more ranks than key-value heads share a micro-batch.
        for arranged in ({"fsdp_size": 2}, {"fsdp_size": 2, "ulysses_sequence_parallel_size": 4}):
            assert_parity(pool, configured(cfg, variant, **arranged), variant, sequences, plain[variant.lora])


@pytest.fixture(scope="module")
def experts(
    tmp_path_factory: pytest.TempPathFactory, sequences: tuple[TrainSequence, ...]
) -> tuple[Path, dict[bool, Plain]]:
    """A mixture of five experts, which no number of ranks divides; of four ranks the last has none of them."""
    family = FAMILIES["Qwen3-MoE"]
    directory = tmp_path_factory.mktemp("experts")
    save_model(dataclasses.replace(family, keys=family.keys | {"num_experts": 5}), directory)
    return directory, {lora: plain_results(directory, sequences, lora=lora) for lora in (False, True)}


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(Variant(checkpointing="selective"), id="packed_full"),
        pytest.param(Variant(packed=False, lora=True, checkpointing="full"), id="separate_lora"),
    ],
)
def test_ranks_that_share_experts_agree_with_plain_transformers(
    row: tuple[ActorPool, Config],
    variant: Variant,
    sequences: tuple[TrainSequence, ...],
    experts: tuple[Path, dict[bool, Plain]],
) -> None:
    pool, cfg = row
    directory, wanted = experts
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, path=str(directory)))
    assert_parity(pool, configured(cfg, variant), variant, sequences, wanted[variant.lora])


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(
            AlgorithmConfig(
                policy_loss="gspo",
                clip_ratio_low=3e-3,
                clip_ratio_high=4e-3,
                rollout_correction=RolloutCorrectionConfig(mode="truncate", level="sequence", upper=1.2),
            ),
            id="by_sequence",
        ),
        pytest.param(AlgorithmConfig(kl=KLConfig(estimator="k3", loss_coeff=0.2), entropy_coeff=0.05), id="kl_entropy"),
    ],
)
@pytest.mark.parametrize("row", [row for row in ROWS if row[1] > 1], indirect=True, ids=row_name)
def test_the_whole_update_of_ranks_that_share_sequences(
    row: tuple[ActorPool, Config], model_dir: Path, algorithm: AlgorithmConfig
) -> None:
    """What belongs to a response as a whole is the same on all ranks that hold parts of it; each token counts once."""
    pool, cfg = row
    cfg = dataclasses.replace(cfg, algorithm=algorithm)
    on_all(pool, rebuild, [cfg] * cfg.actor.num_workers)
    minibatches = (mismatched(model_dir, 0), mismatched(model_dir, 1))
    assert_update(pool, cfg, TrainBatch(version=20, minibatches=minibatches, order=(1, 0, 0, 1)))
