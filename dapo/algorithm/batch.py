"""Builds the training batch from groups: advantages, token weights and mini-batches (DAPO Eqs. 9 and 12).

A `TrainBatch` has `train_batch_size / ppo_mini_batch_size` mini-batches. A step with fewer groups
(`filter_groups.on_budget`) has as few as hold them, of sizes that differ by at most one. Weights are computed over each
mini-batch, because that is what one optimizer step sums over. |o_i| counts only tokens that the policy sampled
(`Response.token_mask`).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dapo.advantage import decoupled_advantages, group_advantages, reinforce_plus_plus_advantages, rloo_advantages
from dapo.algorithm.own.calls import own_advantages, own_token_weights
from dapo.algorithm.own.loading import own_function
from dapo.config.algorithm import ADVANTAGES
from dapo.config.derived import support_size
from dapo.config.reward_functions import label_of, labels, section_of, source_functions
from dapo.config.schema import Config
from dapo.loss import kl_penalty, token_weights
from dapo.pools import ActorPool
from dapo.types import Collected, Float32Array, Group, Int32Array, Response, TrainBatch, TrainSequence


def build_batch(groups: Sequence[Group], cfg: Config, *, version: int) -> TrainBatch:
    """Deals whole groups to mini-batches; `actor.shuffle` permutes them by run seed and version. Responses removed from
    the loss by overlong filtering are not among the sequences: nothing is computed for them."""
    if support_size(cfg) and any(one.support is None for group in groups for one in group.responses if one.num_sampled):
        raise ValueError(
            f"`rollout.top_k` ({cfg.rollout.top_k}) and `algorithm.score_centering` ({cfg.algorithm.score_centering}) "
            f"need the engine's likely tokens, and responses of step {version + 1} came without: they were generated "
            "with other settings; take those"
        )
    dealt, order = deal(len(groups), cfg, version=version)
    advantages = advantages_of(groups, cfg)
    minibatches = [
        _minibatch([groups[i] for i in chosen], [advantages[i] for i in chosen], cfg, version) for chosen in dealt
    ]
    return TrainBatch(version=version, minibatches=tuple(minibatches), order=order)


def deal(num_groups: int, cfg: Config, *, version: int) -> tuple[list[list[int]], tuple[int, ...]]:
    """Returns the group indices of each mini-batch, and the mini-batch of each optimizer step."""
    rng = np.random.default_rng((cfg.trainer.seed, version))
    size = cfg.actor.ppo_mini_batch_size
    count = -(-num_groups // size)
    shuffle = cfg.actor.shuffle and count > 1
    dealt = rng.permutation(num_groups) if shuffle else np.arange(num_groups)
    orders = [rng.permutation(count) if shuffle else np.arange(count) for _ in range(cfg.actor.ppo_epochs)]
    chosen = [sorted(part.tolist()) for part in np.array_split(dealt, count)]
    return chosen, tuple(np.concatenate(orders).tolist())


def advantages_of(groups: Sequence[Group], cfg: Config) -> list[list[float]]:
    """Returns advantages per group and response, 0 for an unscorable one. Groups may differ in size. A reward that is
    not finite in float32, in which the ranks compute, makes only its own response unscorable. A truncated response
    counts in its group's baseline unless overlong filtering excludes it there too. Whitening
    (`algorithm.advantage.whiten`) is over all responses of the step that have an advantage."""
    size = max(len(group.responses) for group in groups)
    rewards = torch.full((len(groups), size), torch.nan, dtype=torch.float64)
    for row, group in zip(rewards, groups, strict=True):
        row[: len(group.scores)] = torch.tensor([score.reward for score in group.scores], dtype=torch.float64)
        row[~row.float().isfinite()] = torch.nan
        if not cfg.reward.overlong_filtering.in_baseline:
            row[: len(group.scores)][torch.tensor(filtered(group, cfg))] = torch.nan
    advantages = _advantages(rewards, groups, cfg)
    if cfg.algorithm.advantage.whiten:
        mean_square = advantages.square().sum() / (~rewards.isnan()).sum().clamp(min=1)
        advantages = advantages / (mean_square.sqrt() + 1e-6)
    return [row[: len(group.responses)].tolist() for row, group in zip(advantages, groups, strict=True)]


def _advantages(rewards: Tensor, groups: Sequence[Group], cfg: Config) -> Tensor:
    """Returns [G, n], by one of `ADVANTAGES`. rewards: [G, n], NaN for an unscorable response and for padding."""
    function, by_std = cfg.algorithm.advantage.function, cfg.algorithm.advantage.normalize_by_std
    match function:
        case "group":
            return group_advantages(rewards, normalize_by_std=by_std)
        case "rloo":
            return rloo_advantages(rewards)
        case "reinforce_plus_plus":
            return reinforce_plus_plus_advantages(rewards, _lengths(rewards, groups))
        case "gdpo":
            return decoupled_advantages(*_parts(rewards, groups, cfg), normalize_by_std=by_std)
    parts, part_weights = _parts(rewards, groups, cfg)
    return own_advantages(
        own_function("algorithm.advantage.function", function),
        rewards=rewards,
        lengths=_lengths(rewards, groups),
        parts=parts,
        part_weights=part_weights,
        normalize_by_std=by_std,
    )


def _lengths(rewards: Tensor, groups: Sequence[Group]) -> Tensor:
    """Returns the sampled tokens of each response, int64 [G, n]."""
    lengths = torch.zeros(rewards.shape, dtype=torch.int64)
    for row, group in zip(lengths, groups, strict=True):
        row[: len(group.responses)] = torch.tensor(group.lengths)
    return lengths


def _parts(rewards: Tensor, groups: Sequence[Group], cfg: Config) -> tuple[Tensor, Tensor]:
    """Returns the parts of the rewards, [G, n, K] in the order of their names, and the factor of each in the reward,
    [K]. NaN marks an unscorable response or a missing part. A score holds penalties with their coefficient; here it is
    divided out."""
    penalties = {"kl_penalty": cfg.algorithm.kl.reward_coeff}
    if cfg.reward.overlong_buffer.enable:
        penalties["overlong"] = cfg.reward.overlong_buffer.penalty_factor
    factors = {"reward_model": cfg.reward.model.weight}
    for entry, functions in {"": cfg.reward.functions, **source_functions(cfg.data.sources)}.items():
        own = labels(functions, section_of(entry)) if entry else labels(functions)
        for label, spec in zip(own, functions, strict=True):
            factors[label_of(entry, label)] = spec.weight
    names = sorted({name for group in groups for score in group.scores for name in score.parts})
    parts = torch.full((*rewards.shape, len(names)), torch.nan, dtype=rewards.dtype)
    for row, group in zip(parts, groups, strict=True):
        for values, score in zip(row, group.scores, strict=False):
            values[:] = torch.tensor([score.parts.get(name, math.nan) for name in names], dtype=rewards.dtype)
    parts[rewards.isnan()] = torch.nan
    factors |= penalties
    parts /= torch.tensor([penalties.get(name) or 1.0 for name in names], dtype=rewards.dtype)
    return parts, torch.tensor([factors.get(name, 1.0) for name in names], dtype=rewards.dtype)


def has_signal(group: Group, cfg: Config) -> bool:
    """Whether overlong filtering leaves a response with a nonzero advantage in the loss. If advantages do not depend on
    the group alone, a scored response is enough."""
    if not cfg.reward.overlong_filtering.enable:
        return True
    function = ADVANTAGES.get(cfg.algorithm.advantage.function)
    if function is not None and function.by_group:
        (values,) = advantages_of([group], cfg)
    else:
        values = [float(not math.isnan(score.reward)) for score in group.scores]
    return any(value and not out for value, out in zip(values, filtered(group, cfg), strict=True))


def filtered(group: Group, cfg: Config) -> list[bool]:
    enable = cfg.reward.overlong_filtering.enable
    return [enable and response.truncated for response in group.responses]


def reference_batch(groups: Sequence[Group], *, version: int) -> tuple[TrainSequence, ...]:
    """Returns all responses in order, to compute their log-probabilities by the reference policy only: advantage and
    weight are 0. The reference chooses its experts itself."""
    sequences = [
        _sequence(group, response, version, advantage=0.0, token_weight=0.0)
        for group in groups
        for response in group.responses
    ]
    return tuple(dataclasses.replace(one, prompt_experts=None, experts=None) for one in sequences)


def penalize_kl(groups: Sequence[Group], ref_logprobs: Sequence[Float32Array], cfg: Config) -> tuple[Group, ...]:
    """Returns the groups with `algorithm.kl.reward_coeff` x KL subtracted from every reward, as the part "kl_penalty".

    ref_logprobs: one [S] per response, in the order of `reference_batch`. KL is the sum of the estimate over a
    response's sampled tokens, for the policy that sampled them; accuracies do not change. If a log-probability is not
    finite, the estimate is meaningless: the response is unscorable ("kl") and its part is omitted.
    """
    kl, remaining = cfg.algorithm.kl, iter(ref_logprobs)
    penalized = []
    for group in groups:
        scores = []
        for response, score in zip(group.responses, group.scores, strict=True):
            # Copies: arrays from Ray's object store are read-only, which torch warns about.
            own = torch.tensor(response.sampled_logprobs, dtype=torch.float64)
            reference = torch.tensor(next(remaining), dtype=torch.float64)
            penalty = -kl.reward_coeff * float(kl_penalty(own, reference, kl.estimator).sum())
            if not bool(own.isfinite().all() and reference.isfinite().all()):
                scores.append(dataclasses.replace(score, reward=math.nan, failure=score.failure or "kl"))
                continue
            parts = score.parts | {"kl_penalty": penalty}
            scores.append(dataclasses.replace(score, reward=score.reward + penalty, parts=parts))
        penalized.append(dataclasses.replace(group, scores=tuple(scores)))
    return tuple(penalized)


async def penalized(collected: Collected, actors: ActorPool, cfg: Config, *, version: int) -> Collected:
    """Subtracts the KL penalty from the rewards of the groups to train on; the buffer's choice does not change.
    version: the one that the update starts from."""
    logprobs = await actors.reference_logprobs(reference_batch(collected.groups, version=version))
    return dataclasses.replace(collected, groups=penalize_kl(collected.groups, logprobs, cfg))


def _minibatch(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], cfg: Config, version: int
) -> tuple[TrainSequence, ...]:
    responses = [(group, response) for group in groups for response in group.responses]
    masked = [is_filtered for group in groups for is_filtered in filtered(group, cfg)]
    lengths = [0 if m else response.num_sampled for (_, response), m in zip(responses, masked, strict=True)]
    weights = _token_weights(torch.tensor(lengths), [len(group.responses) for group in groups], cfg).tolist()
    flat = [advantage for row in advantages for advantage in row]
    return tuple(
        _sequence(
            group, response, version, advantage=advantage, token_weight=weight, kept=cfg.weight_sync.keep_kv_cache
        )
        for (group, response), advantage, weight, length in zip(responses, flat, weights, lengths, strict=True)
        if length > 0
    )


def _token_weights(lengths: Tensor, group_sizes: Sequence[int], cfg: Config) -> Tensor:
    mode, longest, own = cfg.algorithm.loss_agg_mode, cfg.data.max_response_length, cfg.algorithm.token_weights
    if own:
        function = own_function("algorithm.token_weights", own)
        return own_token_weights(function, lengths, mode, group_sizes=group_sizes, max_response_length=longest)
    return token_weights(lengths, mode, group_sizes=group_sizes, max_response_length=longest)


def _sequence(
    group: Group, response: Response, version: int, *, advantage: float, token_weight: float, kept: bool = False
) -> TrainSequence:
    prompt = group.draw.prompt
    shared = len(prompt.token_ids) - 1
    return TrainSequence(
        token_ids=np.concatenate([prompt.token_ids, response.token_ids]),
        num_prompt_tokens=len(prompt.token_ids),
        rollout_logprobs=response.sampled_logprobs,
        advantage=advantage,
        token_weight=token_weight,
        staleness=_staleness(response, version, kept=kept),
        token_mask=response.token_mask,
        support=response.sampled_support,
        # Several engines may disagree about a prompt, which the actors compute once: the first response decides.
        prompt_experts=next((one.experts[:shared] for one in group.responses if one.experts is not None), None),
        experts=None if response.experts is None else response.experts[shared:],
    )


def _staleness(response: Response, version: int, *, kept: bool) -> Int32Array:
    """kept: with `weight_sync.keep_kv_cache` a token is as old as the first span, whose keys it attends to."""
    staleness = np.zeros(len(response.token_ids), dtype=np.int32)
    for span in response.policy_versions:
        staleness[span.start : span.end] = version - (response.policy_versions[0] if kept else span).version
    return staleness if response.token_mask is None else staleness[response.token_mask]
