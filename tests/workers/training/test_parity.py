"""Log-probabilities, gradients and whole updates of several ranks against plain transformers, however ranks and memory
are arranged; on one rank: test_families and test_update.
"""

import dataclasses
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from dapo.config.actor import LoraConfig
from dapo.config.algorithm import AlgorithmConfig, ClipCovConfig, KLConfig, KlCovConfig, RolloutCorrectionConfig
from dapo.config.schema import Config
from dapo.types import TrainBatch, TrainSequence
from dapo.workers.actor import ActorPool, RankWork, split_batch
from dapo.workers.training.lora import add_adapters, is_adapter
from tests.support.training.model_families import FAMILIES, save_model
from tests.support.training.plain_experts import plain_mixture, with_random_experts
from tests.support.training.plain_reference import (
    LENGTHS,
    VOCABULARY,
    cut,
    full_weights,
    in_turns,
    make_config,
    make_sequences,
    on_all,
    plain_gradients,
    plain_logprobs,
    rebuild,
    reference,
    start_pool,
    train_batch,
    update,
)
from tests.support.training.plain_update import assert_update, mismatched

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

BOUND = 1e-5
CHUNK_ROWS = 3
LORA = LoraConfig(rank=3, alpha=6.0)
ROWS = [(2, 1), (2, 2), (4, 2)]  # ranks, of which so many share a sequence
# Prompts and responses of many lengths, five of them to one prompt, more tokens than any number of ranks divides.
SEQUENCES = (*LENGTHS, (9, 40), (1, 1), (30, 2), (2, 33), *((11, length) for length in (3, 8, 1, 5, 2)))
Tensors = dict[str, torch.Tensor]
Plain = tuple[dict[bytes, torch.Tensor], Tensors]  # log-probabilities by a sequence's tokens, gradients by name


@dataclasses.dataclass(frozen=True)
class Variant:
    """packed: all sequences in as few micro-batches as there are ranks, else as many as there may be. chunked: logits
    three rows at a time. lora: adapters train, else all weights. offload, checkpointing: as in the configuration. cut:
    the tokens were sampled from a part of the vocabulary. replayed: the experts are given, as an engine would, and not
    the routers' choice."""

    packed: bool = True
    chunked: bool = False
    offload: bool = False
    lora: bool = False
    checkpointing: str = "none"
    cut: bool = False
    replayed: bool = False
    compiled: bool = False


VARIANTS = {
    "packed": Variant(),
    "separate_chunked_offload": Variant(packed=False, chunked=True, offload=True, checkpointing="selective"),
    "separate_offload_lora": Variant(packed=False, offload=True, lora=True, checkpointing="full"),
    "packed_chunked_cut": Variant(chunked=True, cut=True),
    "separate_lora_cut": Variant(packed=False, lora=True, cut=True),
}
COMPILED = {
    "packed": Variant(compiled=True),
    "separate_chunked_offload": Variant(
        packed=False, chunked=True, offload=True, checkpointing="selective", compiled=True
    ),
    "separate_lora": Variant(packed=False, lora=True, checkpointing="full", compiled=True),
}
OF_EXPERTS = {
    "packed": Variant(checkpointing="selective"),
    "separate_lora": Variant(packed=False, lora=True, checkpointing="full"),
    "packed_replayed": Variant(checkpointing="selective", replayed=True),
    "separate_lora_replayed": Variant(packed=False, lora=True, checkpointing="full", replayed=True),
}
COMPILED_EXPERTS = {"packed_replayed_compiled": Variant(checkpointing="selective", replayed=True, compiled=True)}


@pytest.fixture(scope="module")
def sequences(tied_dir: Path) -> tuple[TrainSequence, ...]:
    return in_turns(make_sequences(tied_dir, SEQUENCES, seed=3))


@pytest.fixture(scope="module")
def plain(tied_dir: Path, sequences: tuple[TrainSequence, ...]) -> dict[tuple[bool, bool], Plain]:
    """By whether adapters train, and whether tokens were sampled from a part of the vocabulary."""
    return {
        (lora, is_cut): plain_results(tied_dir, cut(sequences) if is_cut else sequences, lora=lora)
        for lora in (False, True)
        for is_cut in (False, True)
    }


def plain_results(
    directory: Path, sequences: tuple[TrainSequence, ...], *, lora: bool, replayed: bool = False
) -> Plain:
    """One sequence at a time, in one process; gradients of the whole mini-batch, for what trains."""
    model = plain_mixture(directory, sequences, torch.float32) if replayed else reference(directory)
    if lora:
        add_adapters(model, LORA)
        set_adapters(model)
    with torch.no_grad():
        logprobs = {sequence.token_ids.tobytes(): plain_logprobs(model, sequence) for sequence in sequences}
    return logprobs, plain_gradients(model, sequences)


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


def row_name(row: tuple[int, int]) -> str:
    return f"{row[0]}_ranks_{row[1]}_share"


@pytest.fixture(
    scope="module",
    params=[*ROWS[:-1], pytest.param(ROWS[-1], marks=pytest.mark.nightly)],
    ids=[row_name(row) for row in ROWS],
)
def row(request: pytest.FixtureRequest, ray_cluster: None, tied_dir: Path) -> tuple[ActorPool, Config]:
    ranks, shared_by = request.param
    cfg = make_config(tied_dir, num_workers=ranks, ulysses_sequence_parallel_size=shared_by)
    return start_pool(cfg), cfg


def measure(worker: Any, cfg: Config, chunk_elements: int, work: RankWork) -> tuple[torch.Tensor, Tensors, float]:
    """Runs on a rank: builds everything anew; log-probabilities of all tokens, gradients and their norm.

    The optimizer's own step is left out: the gradient is what parity is about.
    """
    from dapo.workers.training.forward import logprobs

    whole = dict(logprobs.LOGITS_CHUNK_ELEMENTS)
    logprobs.LOGITS_CHUNK_ELEMENTS["cpu"] = chunk_elements
    try:
        rebuild(worker, cfg)
        set_adapters(worker._policy.model)
        batches = [worker._updater._collate(sequences) for sequences in work.minibatches[0]]
        [own], _ = worker._updater._before([batches])
        totals, _ = worker._updater._forward_backward(batches, own, None)
        compiled = worker._policy.compiled
        assert (compiled is not None) == cfg.actor.compile
        # On a CPU transformers' product of experts cannot be compiled, and the layers are not.
        assert compiled is None or ("expert" in cfg.model.path) == bool(compiled.failure)
        # A compiled layer has another graph, with other rounding, without a gradient.
        assert totals.max_log_ratio <= (1e-5 if cfg.actor.compile else 1e-6), "the first ratio is 1"
    finally:
        logprobs.LOGITS_CHUNK_ELEMENTS.update(whole)
    trained = [(name, p.grad) for name, p in worker._policy.model.named_parameters() if p.requires_grad]
    gradients = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in trained}
    return torch.cat(list(own)), gradients, totals.grad_norm


def assert_parity(
    pool: ActorPool, cfg: Config, variant: Variant, sequences: tuple[TrainSequence, ...], wanted: Plain, **actor: Any
) -> None:
    lora = LORA if variant.lora else LoraConfig()
    model = dataclasses.replace(cfg.model, gradient_checkpointing=variant.checkpointing, lora=lora)
    offload, reshard = "host" if variant.offload else "none", variant.checkpointing == "full"
    actor |= {"offload": offload, "reshard_after_forward": reshard, "compile": variant.compiled}
    actor_cfg = dataclasses.replace(cfg.actor, **actor)
    rollout = dataclasses.replace(cfg.rollout, top_k=9 if variant.cut else -1)
    cfg = dataclasses.replace(cfg, model=model, actor=actor_cfg, rollout=rollout)
    ranks, shared_by = actor_cfg.num_workers, actor_cfg.ulysses_sequence_parallel_size
    lengths = [len(sequence.token_ids) for sequence in sequences]
    max_tokens = sum(lengths) if variant.packed else max(lengths)
    works = split_batch(train_batch(0, sequences), ranks // shared_by, max_tokens)
    assert {len(work.minibatches[0]) == 1 for work in works} == {variant.packed}
    chunk = CHUNK_ROWS * VOCABULARY if variant.chunked else 1 << 24
    shares = [works[rank // shared_by] for rank in range(ranks)]
    logprobs, wanted_gradients = wanted
    norm = torch.cat([g.double().flatten() for g in wanted_gradients.values()]).norm()
    seen = 0
    for (own, gradients, grad_norm), work in zip(
        on_all(pool, measure, [cfg] * ranks, [chunk] * ranks, shares), shares, strict=True
    ):
        mine = [logprobs[s.token_ids.tobytes()] for micro_batch in work.minibatches[0] for s in micro_batch]
        seen += len(mine)
        assert (own - torch.cat(mine)).abs().max() <= BOUND
        assert gradients.keys() == wanted_gradients.keys()
        distances = {n: float((gradients[n] - g).norm() / g.norm()) for n, g in wanted_gradients.items()}
        assert {name: distance for name, distance in distances.items() if not distance <= BOUND} == {}
        assert grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert seen == shared_by * len(sequences)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_ranks_agree_with_plain_transformers(
    row: tuple[ActorPool, Config],
    variant: Variant,
    sequences: tuple[TrainSequence, ...],
    plain: dict[tuple[bool, bool], Plain],
) -> None:
    pool, cfg = row
    wanted = plain[variant.lora, variant.cut]
    if variant.cut:
        sequences = cut(sequences)
    assert_parity(pool, cfg, variant, sequences, wanted)
    if cfg.actor.num_workers == 4:
        # Copies of the parameters side by side; and more ranks than key-value heads share a micro-batch.
        for arranged in ({"fsdp_size": 2}, {"fsdp_size": 2, "ulysses_sequence_parallel_size": 4}):
            assert_parity(pool, cfg, variant, sequences, wanted, **arranged)


@pytest.mark.nightly
@pytest.mark.parametrize("variant", COMPILED.values(), ids=COMPILED)
def test_compiled_layers_agree_with_plain_transformers(
    row: tuple[ActorPool, Config],
    variant: Variant,
    sequences: tuple[TrainSequence, ...],
    plain: dict[tuple[bool, bool], Plain],
) -> None:
    assert_parity(*row, variant, sequences, plain[variant.lora, variant.cut])


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five experts, which no number of ranks divides; of four ranks the last has none of them."""
    family = FAMILIES["Qwen3-MoE"]
    directory = tmp_path_factory.mktemp("experts")
    save_model(dataclasses.replace(family, keys=family.keys | {"num_experts": 5, "num_local_experts": 5}), directory)
    return directory


@pytest.fixture(scope="module")
def of_experts(
    mixture: Path, sequences: tuple[TrainSequence, ...]
) -> dict[Variant, tuple[tuple[TrainSequence, ...], Plain]]:
    found = {}
    for variant in (*OF_EXPERTS.values(), *COMPILED_EXPERTS.values()):
        own = with_random_experts(sequences, layers=2, experts=5, k=2) if variant.replayed else sequences
        found[variant] = own, plain_results(mixture, own, lora=variant.lora, replayed=variant.replayed)
    return found


@pytest.mark.parametrize(
    "variant",
    [
        *(pytest.param(variant, id=name) for name, variant in OF_EXPERTS.items()),
        *(pytest.param(variant, id=name, marks=pytest.mark.nightly) for name, variant in COMPILED_EXPERTS.items()),
    ],
)
def test_ranks_that_share_experts_agree_with_plain_transformers(
    row: tuple[ActorPool, Config],
    variant: Variant,
    mixture: Path,
    of_experts: dict[Variant, tuple[tuple[TrainSequence, ...], Plain]],
) -> None:
    pool, cfg = row
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, path=str(mixture)))
    assert_parity(pool, cfg, variant, *of_experts[variant])


BY_SEQUENCE = RolloutCorrectionConfig(mode="truncate", level="sequence", upper=1.2)
ALGORITHMS = {
    "by_sequence": AlgorithmConfig(
        policy_loss="gspo", clip_ratio_low=3e-3, clip_ratio_high=4e-3, rollout_correction=BY_SEQUENCE
    ),
    "clip_cov_sequence_mask": AlgorithmConfig(
        policy_loss="clip_cov",
        clip_cov=ClipCovConfig(share=0.1, lower=0.1, upper=2.0),
        rollout_correction=RolloutCorrectionConfig(off_policy_mask_threshold=0.02),
    ),
    "kl_cov": AlgorithmConfig(policy_loss="kl_cov", kl_cov=KlCovConfig(share=0.2)),
    "kl_entropy": AlgorithmConfig(kl=KLConfig(estimator="k3", loss_coeff=0.2), entropy_coeff=0.05),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_the_whole_update_of_ranks(row: tuple[ActorPool, Config], tied_dir: Path, algorithm: AlgorithmConfig) -> None:
    """What belongs to a response as a whole is the same on all ranks that hold parts of it; each token counts once."""
    pool, cfg = row
    cfg = dataclasses.replace(cfg, algorithm=algorithm)
    on_all(pool, rebuild, [cfg] * cfg.actor.num_workers)
    one = mismatched(tied_dir, 2)[:1]  # some ranks have no sequence
    minibatches = (mismatched(tied_dir, 0), mismatched(tied_dir, 1), one)
    batch = TrainBatch(version=20, minibatches=minibatches, order=(1, 0, 2, 0, 1))
    assert_update(update(pool, batch), on_all(pool, full_weights), cfg, batch)
