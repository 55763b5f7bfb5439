"""The policy over packed sequences: training sequences in, log-probability and entropy per response token out.

Both are at the sampling temperature. Logits exist only at response positions, a chunk at a time (DESIGN section 7).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dapo.types import TrainSequence
from workers.attention import Segments

LOGITS_CHUNK_ELEMENTS = 1 << 26  # 256 MiB in float32: 441 tokens of a vocabulary of 152k


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences laid end to end, T tokens, R of them generated. Made by `collate`, consumed by `workers.update`.

    token_ids, position_ids: [1, T] int64; positions restart at 0 in each sequence.
    predictors: [R] int64, the position whose logits predict each response token. labels: [R] int64, these tokens.
    rollout_logprobs, advantages, weights: [R] float32, per response token. segment_ids: [R] int64, the sequence that a
    response token belongs to, from 0. staleness: [R] int64, see `TrainSequence`.
    """

    token_ids: Tensor
    position_ids: Tensor
    segments: Segments
    predictors: Tensor
    labels: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    segment_ids: Tensor
    staleness: Tensor


def collate(sequences: Sequence[TrainSequence], device: torch.device) -> MicroBatch:
    """Lay sequences end to end on `device`.

    Without sequences the micro-batch is one token that nothing is learnt from (R = 0): the rank still takes part in
    every collective of FSDP.
    """
    lengths = [len(sequence.token_ids) for sequence in sequences] or [1]
    ends = np.cumsum(lengths)
    positions, predictors = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for sequence, end in zip(sequences, ends, strict=False):
        positions.append(np.arange(len(sequence.token_ids)))
        predictors.append(np.arange(end - len(sequence.rollout_logprobs), end) - 1)
    tokens = np.concatenate([s.token_ids for s in sequences]).astype(np.int64) if sequences else np.zeros(1, np.int64)
    predict = np.concatenate(predictors)
    counts = [len(s.rollout_logprobs) for s in sequences]

    def to(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return MicroBatch(
        token_ids=to(tokens[None]),
        position_ids=to((np.concatenate(positions) if sequences else np.zeros(1, np.int64))[None]),
        segments=Segments(tuple(lengths), to(np.concatenate([[0], ends]).astype(np.int32))),
        predictors=to(predict),
        labels=to(tokens[predict + 1] if sequences else predict),
        rollout_logprobs=to(np.concatenate([np.zeros(0, np.float32), *(s.rollout_logprobs for s in sequences)])),
        advantages=to(np.repeat(np.array([s.advantage for s in sequences], np.float32), counts)),
        weights=to(np.repeat(np.array([s.token_weight for s in sequences], np.float32), counts)),
        segment_ids=to(np.repeat(np.arange(len(sequences)), counts)),
        staleness=to(np.concatenate([np.zeros(0, np.int64), *(s.staleness for s in sequences)])),
    )


class PackedPolicy(nn.Module):
    """A causal language model of transformers behind one forward over a packed micro-batch; the root of FSDP.

    `model` must have been built with the attention `workers.attention.PACKED_ATTENTION`. Dropout is off for good.
    entropy_gradient: the entropy is part of the loss; without it, it is a metric and costs no memory.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, *, entropy_gradient: bool = False) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, segments: Segments, predictors: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fields of `MicroBatch` -> (natural log-probabilities [R], entropy in nats [R]), float32."""
        hidden = self.model.base_model(
            input_ids=token_ids, position_ids=position_ids, attention_mask=None, use_cache=False, segments=segments
        ).last_hidden_state
        hidden = hidden.squeeze(0).index_select(0, predictors)
        head, vocabulary = self.model.get_output_embeddings(), self.model.config.vocab_size
        return token_logprobs(
            hidden, head, labels, self.temperature, vocabulary, entropy_gradient=self.entropy_gradient
        )


def token_logprobs(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    temperature: float,
    vocabulary: int,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """hidden [R, h], labels [R] -> (log-probability of each label, entropy), [R], under softmax(head / temperature).

    Chunks are computed again in the backward pass, so that [R, vocabulary] in float32 never exists when it is large.
    """
    rows = max(1, LOGITS_CHUNK_ELEMENTS // vocabulary)
    if len(labels) <= rows:
        return _chunk_logprobs(hidden, head, labels, temperature, entropy_gradient)
    parts = [
        checkpoint(_chunk_logprobs, part, head, part_labels, temperature, entropy_gradient, use_reentrant=False)
        for part, part_labels in zip(hidden.split(rows), labels.split(rows), strict=True)
    ]
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def _chunk_logprobs(
    hidden: Tensor, head: nn.Module, labels: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperature
    log_normalizer = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - log_normalizer
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probabilities = torch.exp(logits - log_normalizer.unsqueeze(-1))
        entropy = log_normalizer - (probabilities * logits).sum(dim=-1)
    return logprobs, entropy
