"""Calls user-defined functions with the arguments and result types of the built-in ones. Results
that could be misinterpreted silently are refused."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dapo.algorithm.own.loading import OwnFunction, OwnFunctionError
from dapo.config.algorithm import AlgorithmConfig
from dapo.loss import clamped_difference

STATS = ("clipped", "dual_clipped", "approx_kl")  # of `dapo.loss.policy_loss`


def own_policy_loss(
    own: OwnFunction,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    segment_ids: Tensor,
    cfg: AlgorithmConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns a loss per token, [R], and the statistics of `dapo.loss.policy_loss`. Statistics that the function does
    not return have defaults: nothing is clipped. Raises OwnFunctionError if a shape or dtype does not match."""
    result = own(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        segment_ids=segment_ids,
        clip_ratio_low=cfg.clip_ratio_low,
        clip_ratio_high=cfg.clip_ratio_high,
        clip_ratio_c=cfg.clip_ratio_c,
    )
    loss, stats = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    _like(own, "a loss", loss, logprobs)
    if not isinstance(stats, dict) or (unknown := sorted(map(str, stats.keys() - set(STATS)))):
        what = f"statistics {', '.join(unknown)}" if isinstance(stats, dict) else f"a {type(stats).__name__}"
        raise OwnFunctionError(f"{own.source} gives {what} beside its loss; give a dict of {', '.join(STATS)}, or none")
    for name, values in stats.items():
        like = logprobs if name == "approx_kl" else logprobs.new_empty(logprobs.shape, dtype=torch.bool)
        _like(own, f"`{name}`", values, like)
    nowhere = torch.zeros_like(logprobs, dtype=torch.bool)
    given = {name: values.detach() for name, values in stats.items()}
    kl = clamped_difference(old_logprobs, logprobs.detach())
    return loss, {"clipped": nowhere, "dual_clipped": nowhere, "approx_kl": kl, **given}


def own_advantages(
    own: OwnFunction, *, rewards: Tensor, lengths: Tensor, parts: Tensor, part_weights: Tensor, normalize_by_std: bool
) -> Tensor:
    """Returns advantages, [G, n]. Raises OwnFunctionError if they are not finite."""
    found = own(
        rewards=rewards, lengths=lengths, parts=parts, part_weights=part_weights, normalize_by_std=normalize_by_std
    )
    _like(own, "advantages", found, rewards)
    return _finite(own, "advantages", found)


def own_token_weights(
    own: OwnFunction, response_lengths: Tensor, mode: str, *, group_sizes: Sequence[int], max_response_length: int
) -> Tensor:
    """Returns the weight of each token of each response, [N]. Raises OwnFunctionError if one is not finite."""
    found = own(
        response_lengths=response_lengths, mode=mode, group_sizes=group_sizes, max_response_length=max_response_length
    )
    _like(own, "weights", found, torch.empty(len(response_lengths)))
    return _finite(own, "weights", found)


def _finite(own: OwnFunction, what: str, found: Tensor) -> Tensor:
    if not bool(found.isfinite().all()):
        raise OwnFunctionError(f"{own.source} gives {what} that are not finite; give 0 where there is nothing to train")
    return found


def _like(own: OwnFunction, what: str, found: Any, like: Tensor) -> None:
    """Raises if shape or dtype differ: broadcasting [N] against [N, 1] would silently train on every pair."""
    wanted = f"a tensor of shape {tuple(like.shape)} and type {_short(like.dtype)}"
    if not isinstance(found, Tensor):
        raise OwnFunctionError(f"{own.source} gives {type(found).__name__} as {what}; give {wanted}")
    if found.shape != like.shape:
        raise OwnFunctionError(f"{own.source} gives {what} of shape {tuple(found.shape)}; give {wanted}")
    if found.dtype != like.dtype:
        raise OwnFunctionError(f"{own.source} gives {what} of type {_short(found.dtype)}; give {wanted}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
