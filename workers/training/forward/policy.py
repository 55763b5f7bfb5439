"""The policy over packed sequences: training sequences in, log-probability and entropy per sampled token out, both at
the sampling temperature.

Logits are computed only where a sampled token is predicted. Response tokens that the policy did not sample are only
read, like the prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from dapo.algorithm.mismatch import Variant
from dapo.algorithm.packing import worth_sharing
from dapo.types import Experts, TrainSequence
from dapo.workers.training.forward.attention import Segments, SharedPrompts
from dapo.workers.training.forward.experts import OWN, take_experts
from dapo.workers.training.forward.logprobs import Chunks, chunk_gradient, reduce_chunk, token_logprobs
from dapo.workers.training.forward.recompute import Compiled
from dapo.workers.training.forward.ulysses import gather_rows
from dapo.workers.training.mesh import SequenceParallel

ALONE = SequenceParallel()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences laid end to end: T tokens, of which R predict a sampled token. Made by `collate`, consumed by
    `workers.training.update`. Each sequence-parallel rank holds t of the T tokens, contiguous, and r of the R
    predictors."""

    token_ids: Tensor  # [1, t] int64
    position_ids: Tensor  # [1, t] int64, from 0 in each sequence
    segments: Segments
    predictors: Tensor  # [r] int64, indices into t of the tokens whose logits predict a sampled token
    labels: Tensor  # [r] int64, the sampled tokens
    support: Tensor | None  # [r, K] int32, token ids of `dapo.types.Support`, padded by -1
    counts: tuple[int, ...]  # r of each rank
    rollout_logprobs: Tensor  # [R] float32
    support_logprobs: Tensor | None  # [R, K] float32, of `dapo.types.Support`, padded by -inf
    advantages: Tensor  # [R] float32
    weights: Tensor  # [R] float32
    segment_ids: Tensor  # [R] int64, number of the token's sequence; those without a sampled token are not counted
    staleness: Tensor  # [R] int64, see `TrainSequence`
    experts: Tensor | None = None  # [t, layers, k] int16, to replay; `OWN` where the router chooses itself


def collate(
    sequences: Sequence[TrainSequence],
    device: torch.device,
    sequence_parallel: SequenceParallel = ALONE,
    *,
    share_prompts: bool = True,
) -> MicroBatch:
    """Lays sequences end to end on `device`; with several ranks, up to size - 1 filler tokens make T divisible.
    share_prompts: neighbours with the same prompt have it once, before them, where that saves much. Without sequences
    the micro-batch is one token per rank with nothing to train (R = 0): the rank still takes part in every collective.
    """
    rank, size = sequence_parallel.rank, sequence_parallel.size
    tokens, positions, predict, lengths, prompts, routed = _lay_out(sequences, size, share_prompts)
    whole = [
        length + (lengths[of] if of != i else 0) for i, (length, of) in enumerate(zip(lengths, prompts, strict=True))
    ]
    experts = _experts(routed, len(tokens))
    run = len(tokens) // size
    edges = np.searchsorted(predict, np.arange(size + 1) * run)
    own, mine = slice(rank * run, (rank + 1) * run), slice(edges[rank], edges[rank + 1])
    counts = [len(s.rollout_logprobs) for s in sequences]

    def to(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return MicroBatch(
        token_ids=to(tokens[None, own]),
        position_ids=to(positions[None, own]),
        segments=Segments(
            tuple(lengths),
            to(_sums(lengths)),
            sequence_parallel.group,
            SharedPrompts(tuple(prompts), tuple(whole), to(_sums(whole)), to(_rows(lengths, prompts)))
            if whole != lengths
            else None,
        ),
        predictors=to(predict[mine] - rank * run),
        labels=to(tokens[predict[mine] + 1] if len(predict) else predict),
        support=None if (support := _padded(sequences, "token_ids", -1)) is None else to(support[mine]),
        counts=tuple(np.diff(edges).tolist()),
        rollout_logprobs=to(np.concatenate([np.zeros(0, np.float32), *(s.rollout_logprobs for s in sequences)])),
        support_logprobs=None if (likely := _padded(sequences, "logprobs", -np.inf)) is None else to(likely),
        advantages=to(np.repeat(np.array([s.advantage for s in sequences], np.float32), counts)),
        weights=to(np.repeat(np.array([s.token_weight for s in sequences], np.float32), counts)),
        segment_ids=to(np.unique(np.repeat(np.arange(len(sequences)), counts), return_inverse=True)[1]),
        staleness=to(np.concatenate([np.zeros(0, np.int64), *(s.staleness for s in sequences)])),
        experts=None if experts is None else to(experts[own]),
    )


def _padded(sequences: Sequence[TrainSequence], name: str, padding: float) -> NDArray[Any] | None:
    """Returns a field of the support of all sequences, [R, K]; None if they have none."""
    supports = [sequence.support for sequence in sequences if sequence.support is not None]
    parts = [values for support in supports if (values := getattr(support, name)) is not None]
    if not parts:
        return None
    counts = np.concatenate([support.counts for support in supports])
    padded = np.full((len(counts), counts.max(initial=1)), padding, parts[0].dtype)
    padded[np.arange(padded.shape[1]) < counts[:, None]] = np.concatenate(parts)
    return padded


def _sums(lengths: Sequence[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *lengths], dtype=np.int32)


def _rows(lengths: Sequence[int], prompts: Sequence[int]) -> NDArray[np.int64]:
    """Returns the tokens that each segment attends to, its prompt's and its own, as indices into T."""
    ends = _sums(lengths)
    runs = [np.arange(ends[i], ends[i + 1]) for i in range(len(lengths))]
    seen = [[runs[of], run] if of != i else [run] for i, (run, of) in enumerate(zip(runs, prompts, strict=True))]
    return np.concatenate([run for each in seen for run in each]).astype(np.int64)


def _lay_out(
    sequences: Sequence[TrainSequence], multiple: int, share_prompts: bool
) -> tuple[
    NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], list[int], list[int], list[tuple[int, Experts | None]]
]:
    """Returns (tokens [T], positions [T], predictors [R] as indices into T, lengths and prompts of the N segments, runs
    of experts with the index of their first token). A prompt is a segment's index, its own index if it has none. T > 0
    is a multiple of `multiple`."""
    parts, positions, predictors = [], [], [np.zeros(0, np.int64)]
    lengths: list[int] = []
    prompts: list[int] = []
    routed: list[tuple[int, Experts | None]] = []
    filled = 0

    def add(tokens: NDArray[np.integer], start: int, prompt: int | None = None) -> None:
        nonlocal filled
        prompts.append(len(lengths) if prompt is None else prompt)
        lengths.append(len(tokens))
        parts.append(tokens)
        positions.append(np.arange(start, start + len(tokens)))
        filled += len(tokens)

    for _, neighbours in groupby(sequences, key=lambda sequence: sequence.prompt_key):
        run = list(neighbours)
        shared, prompt = 0, None
        if share_prompts and worth_sharing(len(run[0].shared_prompt), [len(one.token_ids) for one in run]):
            shared, prompt = len(run[0].shared_prompt), len(lengths)
            routed.append((filled, run[0].prompt_experts))
            add(run[0].shared_prompt, 0)
        for sequence in run:
            if not shared:
                routed.append((filled, sequence.prompt_experts))
            add(sequence.token_ids[shared:], shared, prompt)
            first = filled - len(sequence.token_ids) + sequence.num_prompt_tokens - 1
            routed.append((first, sequence.experts))
            response = np.arange(first, filled - 1)
            predictors.append(response if sequence.token_mask is None else response[sequence.token_mask])
    if filler := -filled % multiple if filled else multiple:
        add(np.zeros(filler, np.int64), 0)
    return (
        np.concatenate(parts).astype(np.int64),
        np.concatenate(positions),
        np.concatenate(predictors),
        lengths,
        prompts,
        routed,
    )


def _experts(routed: Sequence[tuple[int, Experts | None]], count: int) -> NDArray[np.int16] | None:
    """Returns [count, layers, k], `OWN` where there are none: in the last token of a sequence and in filler tokens."""
    runs = [(start, rows) for start, rows in routed if rows is not None]
    if not runs:
        return None
    experts = np.full((count, *runs[0][1].shape[1:]), OWN, np.int16)
    for start, rows in runs:
        experts[start : start + len(rows)] = rows
    return experts


class PackedPolicy(nn.Module):
    """A causal language model of transformers behind one forward over a packed micro-batch; the root of FSDP. `model`
    must use an attention of `workers.training.forward.attention.implementation`. Dropout and the noise of expert
    routers are switched off. entropy_gradient: whether the entropy is differentiable; if not, it costs no memory.
    float32_logits: see `token_logprobs`. truncated: whether probabilities are over the support of each position and not
    over the vocabulary."""

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        float32_logits: bool = False,
        truncated: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient
        self.float32_logits, self.truncated = float32_logits, truncated
        take_experts(model)
        self.variant = Variant()
        self.compiled: Compiled | None = None
        self._chunks: Chunks | None = None
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name, value in vars(module).items():  # rates of models that call torch's functions
                if ("drop" in name or "noise" in name) and isinstance(value, float):
                    setattr(module, name, 0.0)

    def compile_by(self, compiled: Compiled, checkpointing: str) -> None:
        """Compiles the decoder layers and the passes over the logits. checkpointing: of activations."""
        compiled.layers(self.model, checkpointing)
        self.compiled = compiled
        self._chunks = Chunks(compiled.function(reduce_chunk), compiled.function(chunk_gradient))

    @torch.no_grad()
    def probe(self, batch: MicroBatch, variant: Variant) -> Tensor:
        """Returns log-probabilities by a variant of the policy, [R, 1 + K]: of the sampled token, then of its support,
        NaN for padding."""
        before = self.temperature, self.variant
        self.temperature, self.variant = self.temperature * variant.temperature, variant
        try:
            logprobs, _, likely = self(batch)
        finally:
            self.temperature, self.variant = before
        if likely is None or batch.support_logprobs is None:
            return logprobs[:, None]
        return torch.cat([logprobs[:, None], likely.masked_fill(batch.support_logprobs.isinf(), math.nan)], dim=1)

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns log-probabilities [R], entropy [R] and log-probabilities of the support [R, K], if the batch has one,
        in nats, float32, equal on all sequence-parallel ranks."""
        replayed = None if self.variant.own_experts else batch.experts
        hidden = self.model.base_model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            use_cache=False,
            segments=batch.segments,
            **({} if replayed is None else {"experts": replayed}),
        ).last_hidden_state
        hidden = hidden.squeeze(0).index_select(0, batch.predictors)
        head, vocabulary = self.model.get_output_embeddings(), self.model.config.vocab_size
        float32_logits = self.float32_logits
        if self.variant.other_head:
            hidden, head, float32_logits = _in_other_type(hidden, head, float32_logits)
        logprobs, entropy, of_support = token_logprobs(
            hidden,
            head,
            batch.labels,
            self.temperature,
            vocabulary,
            entropy_gradient=self.entropy_gradient,
            float32_logits=float32_logits,
            support=batch.support,
            truncated=self.truncated and batch.support is not None,
            chunks=self._chunks,
        )
        if batch.support_logprobs is None:
            of_support = None
        if batch.segments.group is None:
            return logprobs, entropy, of_support
        both = gather_rows(torch.stack([logprobs, entropy], dim=1), batch.counts, batch.segments.group)
        entropy = both[:, 1].clone()  # FSDP registers hooks on outputs; views would lose them
        if of_support is not None:
            of_support = gather_rows(of_support, batch.counts, batch.segments.group)
        return both[:, 0].clone(), entropy if self.entropy_gradient else entropy.detach(), of_support


def _in_other_type(hidden: Tensor, head: nn.Linear, float32_logits: bool) -> tuple[Tensor, nn.Linear, bool]:
    """Returns what gives logits in float32 where they are rounded, and rounded to bfloat16 where they are not."""
    if hidden.dtype is not torch.float32:
        return hidden, head, not float32_logits
    rounded = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
    rounded.weight = nn.Parameter(head.weight.bfloat16())
    if head.bias is not None:
        rounded.bias = nn.Parameter(head.bias.bfloat16())
    return hidden.bfloat16(), rounded, False
