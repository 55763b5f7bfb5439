"""Groups into what the actors train on: advantages, token weights and mini-batches (DESIGN section 5).

In: the groups of one step. Out: a `TrainBatch` of `train_batch_size / ppo_mini_batch_size` mini-batches; the weights
are computed over each mini-batch, because that is what one optimizer step sums over.
"""

from collections.abc import Sequence

import numpy as np
import torch

from dapo.advantage import group_advantages
from dapo.config import Config
from dapo.loss import token_weights
from dapo.types import Group, TrainBatch, TrainSequence


def build_batch(groups: Sequence[Group], cfg: Config, *, version: int) -> TrainBatch:
    """One mini-batch per `actor.ppo_mini_batch_size` groups, in draw order."""
    size = cfg.actor.ppo_mini_batch_size
    starts = range(0, len(groups), size)
    return TrainBatch(
        version=version, minibatches=tuple(_minibatch(groups[start : start + size], cfg) for start in starts)
    )


def advantages_of(groups: Sequence[Group], *, normalize_by_std: bool) -> torch.Tensor:
    """float64 [G, n] (Eq. 9); a NaN reward marks an unscorable response."""
    rewards = torch.tensor([[score.reward for score in group.scores] for group in groups], dtype=torch.float64)
    return group_advantages(rewards, normalize_by_std=normalize_by_std)


def _minibatch(groups: Sequence[Group], cfg: Config) -> tuple[TrainSequence, ...]:
    advantages = advantages_of(groups, normalize_by_std=cfg.algorithm.advantage.normalize_by_std).flatten().tolist()
    responses = [(group.draw.prompt, response) for group in groups for response in group.responses]
    weights = token_weights(
        torch.tensor([len(response.token_ids) for _, response in responses]),
        cfg.algorithm.loss_agg_mode,
        group_sizes=[len(group.responses) for group in groups],
        max_response_length=cfg.data.max_response_length,
    ).tolist()
    return tuple(
        TrainSequence(
            token_ids=np.concatenate([prompt.token_ids, response.token_ids]),
            num_prompt_tokens=len(prompt.token_ids),
            rollout_logprobs=response.rollout_logprobs,
            advantage=advantage,
            token_weight=weight,
        )
        for (prompt, response), advantage, weight in zip(responses, advantages, weights, strict=True)
    )
