"""Tests a user-defined loss on a small synthetic batch: `check_policy_loss(load(read(KEY, "FILE.py:FUNCTION")), cfg)`.
It checks properties of every built-in loss: the result does not depend on packing, order of the sequences, or number of
ranks."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dapo.algorithm.own.calls import own_policy_loss
from dapo.algorithm.own.loading import OwnFunction, OwnFunctionError
from dapo.config.algorithm import AlgorithmConfig

LENGTHS = (5, 2, 7, 1, 4)  # tokens of the responses
ADVANTAGES = (1.2, -0.8, 0.5, -1.5, 0.9)
FAR = 20.0  # nats: the largest log-ratio of the built-in losses
RTOL, ATOL = 1e-4, 1e-6  # sums in another order differ by less, in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Arguments of a loss, per token, [R]; segment_ids counts responses from 1, and 0 are masked tokens."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    segment_ids: Tensor
    weights: Tensor

    def at(self, index: Tensor) -> "Tokens":
        return Tokens(**{field.name: getattr(self, field.name)[index] for field in fields(Tokens)})


def make_tokens(spread: float) -> Tokens:
    """Returns responses with log-ratios of +-`spread` nats; 0: exactly on-policy."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(LENGTHS)
    logprobs = -torch.rand(sum(LENGTHS), generator=generator) * 2 - 0.1
    signs = torch.tensor([1.0, -1.0]).repeat(sum(LENGTHS))[: sum(LENGTHS)]
    return Tokens(
        logprobs=logprobs,
        old_logprobs=logprobs - spread * signs if spread else logprobs.clone(),
        advantages=torch.repeat_interleave(torch.tensor(ADVANTAGES), lengths),
        segment_ids=torch.repeat_interleave(torch.arange(len(LENGTHS)) + 1, lengths),
        weights=torch.repeat_interleave(0.1 + torch.rand(len(LENGTHS), generator=generator), lengths),
    )


def check_policy_loss(own: OwnFunction, cfg: AlgorithmConfig) -> None:
    """Raises OwnFunctionError, with the reason and a remedy, for a loss that no run could train with."""
    near, off = make_tokens(0.0), make_tokens(0.4)
    _, gradient = _tried(own, near, cfg, "where the policy is the one that sampled")
    if not gradient.any():
        raise OwnFunctionError(
            f"{own.source} has gradient 0 for every token where the policy is the one that sampled, as it is in the "
            "first optimizer step of each update; let the gradient flow through `logprobs`"
        )
    straight = _tried(own, off, cfg, "off-policy")
    _tried(own, make_tokens(FAR), cfg, f"where the log-ratio is {FAR:g}")
    _same(straight, _tried(own, off, cfg, "off-policy"), f"{own.source} gives another loss for the same tokens", _STATE)
    _order(own, off, straight, cfg)
    _packing(own, off, straight, cfg)
    if float((near.advantages * gradient).sum()) >= 0:  # of each token alone by now: a mean over all has a sign too
        raise OwnFunctionError(
            f"{own.source} makes tokens less likely whose advantage is positive; a loss is minimized: turn its sign"
        )
    _tried(own, off.at(torch.arange(0)), cfg, "of a micro-batch without tokens")


_STATE = "it must neither draw random numbers nor keep a state"
_ALONE = (
    "a token's loss may depend on its own response alone (`segment_ids` tells one from another), and on no sum or mean "
    "over all tokens, for what is packed together is chance; weights of tokens are `algorithm.loss_agg_mode` or "
    "`algorithm.token_weights`"
)


def _order(own: OwnFunction, tokens: Tokens, straight: tuple[Tensor, Tensor], cfg: AlgorithmConfig) -> None:
    """Checks the loss with the responses in another order."""
    responses = [3, 1, 5, 2, 4]
    index = torch.cat([(tokens.segment_ids == response).nonzero()[:, 0] for response in responses])
    turned = tokens.at(index)
    lengths = torch.tensor([LENGTHS[response - 1] for response in responses])
    numbered = torch.repeat_interleave(torch.arange(len(LENGTHS)) + 1, lengths)
    found = _tried(own, replace(turned, segment_ids=numbered), cfg, "off-policy")
    back = index.argsort()
    what = f"{own.source} depends on the order of the responses"
    _same(straight, (found[0][back], found[1][back]), what, _ALONE)


def _packing(own: OwnFunction, tokens: Tokens, straight: tuple[Tensor, Tensor], cfg: AlgorithmConfig) -> None:
    """Checks the loss with the responses split into several micro-batches, and with masked tokens among them."""
    found = []
    for responses in ((1,), (2, 3), (4, 5)):
        index = torch.isin(tokens.segment_ids, torch.tensor(responses)).nonzero()[:, 0]
        part = tokens.at(index)
        numbered = part.segment_ids - part.segment_ids[0] + 1
        found.append(_tried(own, replace(part, segment_ids=numbered), cfg, "off-policy"))
    together = tuple(torch.cat([one[place] for one in found]) for place in (0, 1))
    what = f"{own.source} depends on how responses are packed into micro-batches"
    _same(straight, (together[0], together[1]), what, _ALONE)

    size = len(tokens.logprobs)
    index = torch.cat([torch.tensor([size]), torch.arange(8), torch.tensor([size] * 3), torch.arange(8, size)])
    values = {field.name: getattr(tokens, field.name) for field in fields(Tokens)}
    padded = Tokens(**{name: torch.cat([each, torch.zeros_like(each[:1])]) for name, each in values.items()})
    loss, gradient = _tried(own, padded.at(index), cfg, "with masked tokens, which are 0 in all tensors")
    inside = index < size
    what = f"{own.source} depends on masked tokens, which are 0 in all tensors and of segment 0"
    _same(straight, (loss[inside], gradient[inside]), what, _ALONE)


def _same(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], what: str, remedy: str) -> None:
    for name, one, other in zip(("loss", "gradient"), left, right, strict=True):
        if not torch.allclose(one, other, rtol=RTOL, atol=ATOL):
            far = float((one - other).abs().max())
            raise OwnFunctionError(f"{what}: the {name} of a token differs by up to {far:.3g}; {remedy}")


def _tried(own: OwnFunction, tokens: Tokens, cfg: AlgorithmConfig, where: str) -> tuple[Tensor, Tensor]:
    """Returns loss and gradient per token, [R] each, finite; the gradient is that of the weighted sum."""
    leaf = tokens.logprobs.clone().requires_grad_()
    others = (tokens.old_logprobs.clone(), tokens.advantages.clone(), tokens.segment_ids.clone())
    given = dict(zip(("logprobs", "old_logprobs", "advantages", "segment_ids"), (leaf * 1.0, *others), strict=True))
    loss, _ = own_policy_loss(own, given["logprobs"], *others, cfg)
    for name, values in given.items():
        if not torch.equal(values.detach(), getattr(tokens, name)):
            raise OwnFunctionError(f"{own.source} changes `{name}` in place; change a copy, or make a new tensor")
    if not loss.requires_grad:
        raise OwnFunctionError(
            f"{own.source} gives a loss without gradient; compute it from `logprobs`, and not from `logprobs.detach()`"
        )
    found = torch.autograd.grad((tokens.weights * loss).sum(), leaf, allow_unused=True)[0]
    gradient = torch.zeros_like(leaf) if found is None else found
    for name, values in (("loss", loss), ("gradient", gradient)):
        if not bool(values.isfinite().all()):
            bad = int((~values.isfinite()).sum())
            raise OwnFunctionError(
                f"{own.source} has a {name} that is not finite in {bad} of {len(values)} tokens {where}; clamp what "
                "goes into an exponential (`dapo.loss.clamped_difference`), and divide by nothing that may be 0"
            )
    return loss.detach(), gradient
