"""Splits a `TrainBatch` among the ranks, on the driver: each rank gets packed micro-batches of every mini-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.algorithm.packing import ATTENTION_EQUALS_REST_TOKENS, pack
from dapo.config.facts.model_shape import ModelShape, UnknownShape, read_shape
from dapo.types import TrainBatch, TrainSequence

MicroBatches = tuple[tuple[TrainSequence, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """One rank's share of a `TrainBatch`. Made by `split_batch`, consumed by `workers.actor.ActorWorker.update`."""

    version: int
    minibatches: tuple[MicroBatches, ...]  # micro-batches of each; equally many on all ranks, some may be empty
    order: tuple[int, ...]  # see `TrainBatch`


def split_batch(
    batch: TrainBatch,
    num_ranks: int,
    max_tokens: int,
    equal_at: int = ATTENTION_EQUALS_REST_TOKENS,
    share_prompts: bool = True,
) -> list[RankWork]:
    """Packs each mini-batch over ranks, or groups of sequence-parallel ranks (`dapo.algorithm.packing`). Raises
    ValueError for a sequence longer than `max_tokens`, the bound on a micro-batch."""
    packed = [
        split_sequences(sequences, num_ranks, max_tokens, equal_at, share_prompts)[0] for sequences in batch.minibatches
    ]
    return [
        RankWork(version=batch.version, minibatches=tuple(shares[rank] for shares in packed), order=batch.order)
        for rank in range(num_ranks)
    ]


def split_sequences(
    sequences: Sequence[TrainSequence], num_ranks: int, max_tokens: int, equal_at: int, share_prompts: bool
) -> tuple[list[MicroBatches], Callable[[Sequence[list[Any]]], list[Any]]]:
    """Packs sequences over ranks as `split_batch` does. Also returns a function that puts the ranks' results, one per
    sequence in the order of their micro-batches, back into the order of the sequences."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    shared = [(one.prompt_key, len(one.shared_prompt)) for one in sequences] if share_prompts else []
    packed = pack(lengths, num_ranks, max_tokens, equal_at, shared)

    def in_order(results: Sequence[list[Any]]) -> list[Any]:
        found: dict[int, Any] = {}
        for micro_batches, values in zip(packed, results, strict=True):
            found |= zip((i for indices in micro_batches for i in indices), values, strict=True)
        return [found[i] for i in range(len(sequences))]

    return [tuple(tuple(sequences[i] for i in indices) for indices in share) for share in packed], in_order


def known_shape(model_path: str) -> ModelShape | None:
    try:
        return read_shape(model_path)
    except UnknownShape:
        return None


def equal_at(shape: ModelShape | None) -> int:
    """Returns the length at which attention costs as much as the rest; a guess if the model's shape is unknown."""
    return ATTENTION_EQUALS_REST_TOKENS if shape is None else shape.attention_equals_rest_tokens
