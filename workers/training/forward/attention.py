"""Attention over packed sequences, registered in transformers as `PACKED_ATTENTION`.

The sequences of a micro-batch lie end to end; `Segments` says where. Each attends causally within itself, without a
[T, T] mask: variable-length kernels on GPU, one call per sequence on CPU. A prompt that sequences share is computed
once; only its keys and values are repeated. Sequence-parallel ranks each compute all tokens of some heads (`ulysses`).
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from dapo.config.actor import PACKED_ATTENTION as PACKED
from dapo.config.rules.model import MASKLESS, OTHER, why_not_packed
from dapo.workers.training.forward.ulysses import gather_heads, scatter_heads

PACKED_ATTENTION = "dapo_packed"
FA3 = "flash_attn_interface"  # the package of FlashAttention-3
_VARLEN_TAKES_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # since torch 2.12


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """The prompt that each of N segments begins with."""

    of: tuple[int, ...]  # index of the segment that is its prompt; its own index if it has none
    lengths: tuple[int, ...]  # tokens of each with its prompt
    cu_seq_lens: Tensor  # [N + 1] int32 on the model's device: cumulative lengths from 0
    rows: Tensor  # int64 on the model's device: these tokens, sequence by sequence, as indices into T
    longest: int = 0  # of `lengths`

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest", max(self.lengths))


@dataclass(frozen=True, slots=True)
class Segments:
    """Positions of the N sequences of a micro-batch. Made by `workers.training.forward.policy`, consumed by
    `packed_attention`."""

    lengths: tuple[int, ...]  # tokens of each
    cu_seq_lens: Tensor  # [N + 1] int32 on the model's device: cumulative lengths from 0
    group: dist.ProcessGroup | None = None  # ranks with an equal run of the tokens each; None: all are here
    prompts: SharedPrompts | None = None  # a shared prompt is a segment itself, and missing in those that share it
    longest: int = 0  # of `lengths`, which compiled layers do not read: other ones would compile them again

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest", max(self.lengths))

    @property
    def keys(self) -> "Segments | SharedPrompts":
        """Lengths and cumulative lengths of the tokens that each sequence attends to."""
        return self.prompts or self


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """Computes attention with transformers' signature: query [1, H, T, D], key and value [1, H_kv, T, D] ->
    ([1, T, H, D], None).

    T is the number of this rank's tokens; the ranks of `segments.group` together hold the micro-batch. Dropout is
    ignored on purpose: log-probabilities must be those of the sampling policy. Raises ValueError for a sliding window
    shorter than a sequence, for logit soft-capping and for attention sinks.
    """
    longest = segments.keys.longest
    if (sliding_window is not None and sliding_window < longest) or softcap is not None or s_aux is not None:
        raise ValueError(
            f"`model.path`: {type(module).__name__} uses sliding-window attention ({sliding_window} tokens, longest "
            f"sequence {longest}), soft-capping ({softcap}) or attention sinks, which packed attention does not "
            "compute; choose a model with plain causal attention"
        )
    kernel = _varlen if query.is_cuda else _compiled_per_segment if torch.compiler.is_compiling() else _per_segment
    return _over_all_tokens(partial(kernel, segments=segments, scaling=scaling), query, key, value, segments), None


def implementation(name: str) -> str:
    """Returns the name to build a model with, for `model.attn_implementation`. A function of transformers keeps its
    name, but is wrapped to receive the sequence boundaries. Raises ValueError for an unknown name."""
    if name in PACKED:
        return PACKED_ATTENTION
    known = AttentionInterface()
    if name not in known.valid_keys():
        raise ValueError(
            f"`model.attn_implementation` ({name}) is unknown to transformers; take auto or one of "
            f"{', '.join(sorted(known.valid_keys()))}"
        )
    inner = known[name]
    if not (isinstance(inner, partial) and inner.func is _pass_through):
        AttentionInterface.register(name, partial(_pass_through, inner))
    return name


def choose_kernel(name: str, device: str) -> str:
    """Makes packed attention on a GPU use the kernel of `model.attn_implementation`, and returns its name; "" on a CPU
    or for another attention. Raises ValueError if FlashAttention-3 is asked for and cannot be used."""
    if device != "cuda" or name not in PACKED:
        return ""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    if name == "fa2" or (name == "auto" and not (hopper and find_spec(FA3))):
        return "FlashAttention-2"
    if not (hopper and find_spec(FA3)):
        raise ValueError(
            f"`model.attn_implementation` (fa3) needs a Hopper GPU and the package {FA3}, and rank's GPU is "
            f"{torch.cuda.get_device_name()}, the package {'there' if find_spec(FA3) else 'missing'}; take auto"
        )
    activate_flash_attention_impl("FA3")
    return "FlashAttention-3"


def why_unpackable(model: PreTrainedModel) -> str:
    """Returns what is wrong with a model and what to do; "" if no problem is known. Such a model mixes the sequences of
    a micro-batch, cannot be called on them, or computes its logits in another way than the actors do."""
    masked = model.config._attn_implementation not in (PACKED_ATTENTION, *MASKLESS)
    if why := why_not_packed(type(model), type(model.base_model), masked=masked):
        return why
    if model.config.get_text_config() is not model.config:
        return f"is not of text alone{OTHER}"
    if {*model.children()} - {model.base_model, model.get_output_embeddings()}:
        return f"has more than a linear head between its last layer and its logits{OTHER}"
    return ""


def _pass_through(
    inner: Callable[..., tuple[Tensor, Any]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Calls another attention function of transformers on packed sequences; its mask comes from the positions. Without
    segments, as for another model in the same process, the call is unchanged."""
    if segments is None:
        return inner(module, query, key, value, attention_mask, **options)
    cu, longest = segments.cu_seq_lens, segments.longest
    where = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest, "dropout": 0.0}

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return inner(module, query, key, value, attention_mask, **(options | where))[0]

    return _over_all_tokens(run, query, key, value, segments), None


def _over_all_tokens(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, segments: Segments
) -> Tensor:
    """Calls `attend` on all tokens of the micro-batch, for this rank's share of the heads."""
    if segments.group is None:
        return attend(query, key, value)
    missing = dist.get_world_size(segments.group) // key.shape[1]
    if missing > 1:  # fewer key-value heads than ranks: neighbours get the same one
        key, value = key.repeat_interleave(missing, dim=1), value.repeat_interleave(missing, dim=1)
    query, key, value = scatter_heads([query, key, value], segments.group)
    return gather_heads(attend(query, key, value), segments.group)


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """Runs one variable-length kernel for all sequences (bfloat16 or float16)."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"`model.dtype` ({query.dtype}) must be bfloat16 or float16 on GPU, or set `trainer.device=cpu`"
        )
    key, value = _joined(key, value, segments)
    groups = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    if groups > 1 and _VARLEN_TAKES_GROUPED_HEADS:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
    cu, longest = segments.cu_seq_lens, segments.longest
    out = varlen_attn(q, k, v, cu, segments.keys.cu_seq_lens, longest, segments.keys.longest, **options)
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)


def _per_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """Makes one call per sequence, on views. Sorting sequences into right-padded buckets is not faster. Measured for
    one layer with 4 heads on one thread, forward and backward: 11.0 ms against 11.4-12.9 ms (64 sequences of 42 tokens)
    and 75 ms against 76-95 ms (64 long-tailed ones, up to 489 tokens); one padded batch took 10.7 ms and 450 ms."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    parts = zip(
        query.split(segments.lengths, dim=2), _with_prompts(key, segments), _with_prompts(value, segments), strict=True
    )
    outs = []
    for q, k, v in parts:
        mask = _causal_mask(q, k)
        outs.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling))
    return torch.cat([out.transpose(1, 2) for out in outs], dim=1)


def _causal_mask(q: Tensor, k: Tensor) -> Tensor | None:
    """Returns the mask of queries that are the last of the keys' tokens; None if they are all of them."""
    own, seen = q.shape[2], k.shape[2]
    return None if own == seen else torch.ones(own, seen, dtype=torch.bool).tril(seen - own)


def _compiled_per_segment(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None
) -> Tensor:
    """`_per_segment` as one operation of a compiled layer."""
    key, value = _joined(key, value, segments)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out: Tensor = _segments_on_cpu(query, key, value, segments.cu_seq_lens, segments.keys.cu_seq_lens, scaling)
    return out.transpose(1, 2)


@torch.library.custom_op("dapo::segments_on_cpu", mutates_args=())
def _segments_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, cu_query: Tensor, cu_key: Tensor, scale: float | None
) -> Tensor:
    """[1, H, T, D] of queries and [1, H, T_keys, D] of keys and values -> [1, H, T, D]."""
    parts = zip(*_split(query, key, value, cu_query, cu_key), strict=True)
    return torch.cat([_flash_on_cpu(q, k, v, scale)[0] for q, k, v in parts], dim=2)


@torch.library.custom_op("dapo::segments_on_cpu_backward", mutates_args=())
def _segments_on_cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_query: Tensor, cu_key: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values = _split(query, key, value, cu_query, cu_key)
    found = []
    for g, q, k, v in zip(grad.split([part.shape[2] for part in queries], dim=2), queries, keys, values, strict=True):
        out, log_sum = _flash_on_cpu(q, k, v, scale)
        mask = _causal_mask(q, k)
        found.append(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, out, log_sum, 0.0, mask is None, attn_mask=_added(mask, q), scale=scale
            )
        )
    of_query, of_key, of_value = (torch.cat(parts, dim=2) for parts in zip(*found, strict=True))
    return of_query, of_key, of_value


@_segments_on_cpu.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    return query.new_empty(query.shape)


@_segments_on_cpu_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_segments_on_cpu_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None


_segments_on_cpu.register_autograd(_differentiate, setup_context=_keep)


def _split(
    query: Tensor, key: Tensor, value: Tensor, cu_query: Tensor, cu_key: Tensor
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    own, seen = cu_query.diff().tolist(), cu_key.diff().tolist()
    return query.split(own, dim=2), key.split(seen, dim=2), value.split(seen, dim=2)


def _flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    mask = _causal_mask(q, k)
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask is None, attn_mask=_added(mask, q), scale=scale
    )
    return out, log_sum


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    return None if mask is None else torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, -torch.inf)


def _joined(key: Tensor, value: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Returns keys and values, each [1, H, T_keys, D], where each sequence has its shared prompt."""
    if segments.prompts is None:
        return key, value
    if torch.compiler.is_compiling():
        return key.index_select(2, segments.prompts.rows), value.index_select(2, segments.prompts.rows)
    joined, also = (torch.cat(_with_prompts(x, segments), dim=2) for x in (key, value))
    return joined, also


def _with_prompts(x: Tensor, segments: Segments) -> list[Tensor]:
    """Splits [1, H, T, D] into the sequences, each with the prompt that it shares."""
    parts = x.split(segments.lengths, dim=2)
    if segments.prompts is None:
        return list(parts)
    return [
        part if prompt == i else torch.cat([parts[prompt], part], dim=2)
        for i, (prompt, part) in enumerate(zip(segments.prompts.of, parts, strict=True))
    ]


# Without a mask function of this name transformers makes no mask. Before it calls one, it reads positions on the host.
AttentionInterface.register(PACKED_ATTENTION, packed_attention)
