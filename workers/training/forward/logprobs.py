"""Log-probability and entropy of each response token from hidden states, [R, h] -> [R], with a backward pass.

Logits are computed in chunks that reuse the same buffers, and recomputed in the backward pass. The [R, vocabulary]
logits and their gradient are never stored: at 20,480 tokens and 152k entries each would take 12.4 GB.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dapo.config.schema import LOGITS_CHUNK_ELEMENTS


class Chunks(NamedTuple):
    """The passes over a chunk's logits, compiled."""

    reduce: Callable[..., tuple[Tensor, Tensor, Tensor]]  # `reduce_chunk`
    gradient: Callable[..., None]  # `chunk_gradient`


def token_logprobs(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    temperature: float,
    vocabulary: int,
    *,
    entropy_gradient: bool = False,
    float32_logits: bool = False,
    support: Tensor | None = None,
    truncated: bool = False,
    chunks: Chunks | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes them under softmax(head(hidden) / temperature) over the first `vocabulary` rows of the head or, if
    truncated, over the tokens of `support`.

    hidden: [R, h]. labels: [R] int64. entropy_gradient: whether the entropy is differentiable; otherwise it is a
    metric. float32_logits: whether logits keep the product's float32 sums instead of being rounded to the dtype of
    `hidden`; their gradient is rounded to it in both cases. support: [R, K] int, tokens of each position, padded by -1;
    the label is among them if truncated. chunks: used without support and bias. Returns (natural log-probability of
    each label, entropy in nats), both [R], in float32 or wider, and the log-probabilities of the support [R, K], 0 for
    padding. With R = 0 they are empty and gradients zero, so that an FSDP rank without tokens still takes part. Raises
    ValueError unless the head is an `nn.Linear`: only its weight and bias are used.
    """
    if type(head) is not nn.Linear:
        raise ValueError(
            f"`model.path`: the output head is {type(head).__name__}, and log-probabilities are computed chunk by "
            "chunk for a plain torch.nn.Linear only; choose another architecture, and leave the head out of "
            "`model.lora.target_modules`"
        )
    return _TokenLogprobs.apply(
        hidden,
        head.weight,
        head.bias,
        labels,
        temperature,
        vocabulary,
        entropy_gradient,
        float32_logits,
        support,
        truncated,
        chunks if support is None and head.bias is None else None,
    )


def reduce_chunk(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probability of the label, logarithm of the normalizer, and entropy, each [rows], of logits
    [rows, vocabulary] before the temperature."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    normalizer = z.logsumexp(-1)
    entropy = normalizer - ((z - normalizer[:, None]).exp() * z).sum(-1)
    return z.gather(-1, labels[:, None]).squeeze(-1) - normalizer, normalizer, entropy


def chunk_gradient(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    normalizer: Tensor,
    entropy: Tensor | None,
    by_logprob: Tensor,
    by_entropy: Tensor,
) -> None:
    """Replaces the logits of `reduce_chunk` by the gradient with respect to them. normalizer, entropy: [rows]; None: no
    gradient through the entropy. by_logprob, by_entropy: [rows, 1]."""
    z = logits.to(normalizer.dtype) / temperature - normalizer[:, None]
    factor = by_logprob if entropy is None else by_logprob + (z + entropy[:, None]) * by_entropy
    own = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    logits.copy_(torch.where(own, by_logprob, 0.0) - z.exp() * factor)


class _Logits:
    """Computes the logits of each chunk in reused buffers: fresh memory is expensive on a CPU."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        vocabulary: int,
        *,
        float32_logits: bool,
    ) -> None:
        self.weight = weight[:vocabulary]
        self._bias = None if bias is None else bias[:vocabulary]
        self._hidden, self._temperature = hidden, temperature
        num_chunks = -(-len(hidden) * vocabulary // LOGITS_CHUNK_ELEMENTS[hidden.device.type])
        self.rows = -(-len(hidden) // max(1, num_chunks))
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.product = hidden.new_empty(self.rows, vocabulary)
        self._unrounded = float32_logits and self.dtype is not hidden.dtype
        if self._unrounded and not hidden.is_cuda:  # only CUDA has products that are wider than their factors
            self._wide_weight = self.weight.to(self.dtype)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields (slice of the R rows, their logits / temperature [rows, vocabulary], which may be overwritten)."""
        copied = not self._unrounded and self.dtype is not self.product.dtype
        buffer = torch.empty_like(self.product, dtype=self.dtype) if copied else None
        for where, raw in self.raw():
            values = raw if buffer is None else buffer[: len(raw)].copy_(raw)
            if self._temperature != 1:
                values.div_(self._temperature)
            yield where, values

    def raw(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields the logits before the temperature, in the dtype of `hidden` unless they are to be unrounded."""
        buffer = torch.empty_like(self.product, dtype=self.dtype) if self._unrounded else self.product
        for start in range(0, len(self._hidden), self.rows or 1):
            where = slice(start, start + self.rows)
            part = self._hidden[where]
            raw = buffer[: len(part)]
            if self._unrounded:
                self._multiply_unrounded(part, raw)
            elif self._bias is None:
                torch.mm(part, self.weight.T, out=raw)
            else:
                torch.addmm(self._bias, part, self.weight.T, out=raw)
            yield where, raw

    def _multiply_unrounded(self, part: Tensor, values: Tensor) -> None:
        if part.is_cuda:
            torch.mm(part, self.weight.T, out_dtype=self.dtype, out=values)
        else:
            torch.mm(part.to(self.dtype), self._wide_weight.T, out=values)
        if self._bias is not None:
            values.add_(self._bias)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        vocabulary: int,
        entropy_gradient: bool,
        float32_logits: bool,
        support: Tensor | None,
        truncated: bool,
        chunks: Chunks | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logits = _Logits(hidden, weight, bias, temperature, vocabulary, float32_logits=float32_logits)
        # Not three views of one tensor: FSDP registers its backward hook on the outputs.
        logprobs, entropy, normalizer = (hidden.new_empty(len(hidden), dtype=logits.dtype) for _ in range(3))
        of_support = None if support is None else hidden.new_zeros(support.shape, dtype=logits.dtype)
        if chunks is not None:
            for where, raw in logits.raw():
                found = chunks.reduce(raw, labels[where], temperature)
                logprobs[where], normalizer[where], entropy[where] = found
        scratch = logits.product.new_empty(0 if chunks is not None else logits.product.shape, dtype=logits.dtype)
        for where, z in logits.chunks() if chunks is None else ():
            own = z.gather(-1, labels[where, None]).squeeze(-1)
            likely = None if support is None else _of_support(z, support[where])
            if likely is not None and truncated:
                z = likely.clone()
            largest = z.amax(dim=-1, keepdim=True)
            own.sub_(largest.squeeze(-1))
            z.sub_(largest)
            exponentials = z.exp() if truncated else torch.exp(z, out=scratch[: len(z)])
            total = exponentials.sum(dim=-1)
            log_total = total.log()
            logprobs[where] = own - log_total
            normalizer[where] = largest.squeeze(-1) + log_total
            entropy[where] = log_total - exponentials.mul_(z).sum(dim=-1) / total
            if of_support is not None and likely is not None and support is not None:
                of_support[where] = (likely - normalizer[where, None]).masked_fill_(support[where] < 0, 0.0)
        ctx.save_for_backward(hidden, weight, bias, labels, support, normalizer, entropy if entropy_gradient else None)
        ctx.temperature, ctx.vocabulary = temperature, vocabulary
        ctx.float32_logits, ctx.truncated, ctx.chunks = float32_logits, truncated, chunks
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, of_support

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprobs_grad: Tensor, entropy_grad: Tensor, support_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, support, normalizer, entropy = ctx.saved_tensors
        logits = _Logits(hidden, weight, bias, ctx.temperature, ctx.vocabulary, float32_logits=ctx.float32_logits)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=logits.dtype) if needs_weight else None
        bias_grad = torch.zeros_like(bias, dtype=logits.dtype) if needs_bias else None

        def add(where: slice, grad: Tensor) -> None:
            # Reuse the product's buffer: the matrix products take the gradient in the model's dtype.
            grad = grad if grad.dtype is logits.product.dtype else logits.product[: len(grad)].copy_(grad)
            if hidden_grad is not None:
                torch.mm(grad, logits.weight, out=hidden_grad[where])
            if weight_grad is not None:
                _add_product(weight_grad[: ctx.vocabulary], grad.T, hidden[where])

        # With p = softmax(z): d logprob / dz = onehot - p, and d entropy / dz = -p * (log p + entropy).
        by_logprob = (logprobs_grad / ctx.temperature).unsqueeze(-1)
        by_entropy = (entropy_grad / ctx.temperature).unsqueeze(-1)
        by_all = by_logprob
        if support is not None:
            by_support = (support_grad / ctx.temperature).masked_fill(support < 0, 0.0)
            by_all = by_logprob + by_support.sum(dim=-1, keepdim=True)
        for where, raw in logits.raw() if ctx.chunks is not None else ():
            of_entropy = None if entropy is None else entropy[where]
            factors = by_logprob[where], by_entropy[where]
            ctx.chunks.gradient(raw, labels[where], ctx.temperature, normalizer[where], of_entropy, *factors)
            add(where, raw)
        scratch = None if entropy is None or ctx.chunks else torch.empty_like(logits.product, dtype=logits.dtype)
        for where, whole in logits.chunks() if ctx.chunks is None else ():
            z = _of_support(whole, support[where]) if ctx.truncated else whole
            z.sub_(normalizer[where, None])
            if scratch is None:
                grad = z.exp_().mul_(-by_all[where])
            else:
                probabilities = z.exp() if ctx.truncated else torch.exp(z, out=scratch[: len(z)])
                z.add_(entropy[where, None]).mul_(by_entropy[where]).add_(by_all[where])
                grad = z.mul_(probabilities).neg_()
            if ctx.truncated:
                grad = whole.zero_().scatter_add_(1, _indices(support[where]), grad)
            grad.scatter_add_(1, labels[where, None], by_logprob[where])
            if support is not None:
                grad.scatter_add_(1, _indices(support[where]), by_support[where])
            if bias_grad is not None:
                bias_grad[: ctx.vocabulary] += grad.sum(dim=0)
            add(where, grad)
        return hidden_grad, _cast(weight_grad, weight), _cast(bias_grad, bias), *[None] * 8


def _indices(support: Tensor) -> Tensor:
    return support.long().clamp(min=0)


def _of_support(z: Tensor, support: Tensor) -> Tensor:
    """Returns the logits [rows, K] of the tokens of `support`; padding gets the least number, whose probability is 0
    (-inf would give NaN times 0 in the entropy)."""
    return z.gather(1, _indices(support)).masked_fill_(support < 0, torch.finfo(z.dtype).min / 4)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to total, whose dtype may differ."""
    if total.dtype is right.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))


def _cast(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if grad is None or like is None else grad.to(like.dtype)
