"""Evaluates on held-out prompts: mean@n, the mean accuracy over n samples per prompt.

In: prompts, the two pools, `eval.*`. Out: metrics. The seeds depend on prompt and sample but not on the policy version,
so that two evaluations differ by the policy alone.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

import numpy as np

from dapo.clock import PhaseClock
from dapo.config.schema import Config
from dapo.faults.points import fault_point
from dapo.pools import Pools
from dapo.report.watchdog import waiting
from dapo.sampling.stream import ended_unasked, response_seed, sampling_of, scored_group
from dapo.types import Cut, Draw, Group, Prompt


def evaluates_after(version: int, cfg: Config) -> bool:
    """Returns whether policy `version`, of an update that has just ended, is to be evaluated."""
    every = cfg.eval.every
    return cfg.eval.after_train if version >= cfg.trainer.total_steps else every > 0 and version % every == 0


async def evaluate(
    prompts: Sequence[Prompt],
    pools: Pools,
    cfg: Config,
    *,
    clock: PhaseClock,
    keep: Callable[[Sequence[Group]], None] = lambda groups: None,
) -> dict[str, float]:
    """Returns `eval/accuracy` over all prompts and, with several data sources, `eval/SOURCE/accuracy`. keep: takes the
    groups that they are computed from."""
    rollouts, rewards, seed = pools.rollouts, pools.rewards, cfg.trainer.seed
    sampling = sampling_of(cfg.eval, cfg.data.max_response_length)
    at_once = asyncio.Semaphore(max(1, 2 * rollouts.capacity // sampling.n))

    ended = 0

    async def one(prompt: Prompt) -> Group:
        nonlocal ended
        async with at_once:
            seeds = [response_seed(seed, "eval", prompt.id, sample) for sample in range(sampling.n)]
            responses = rollouts.generate(f"eval-{prompt.id}", prompt.token_ids, sampling, seeds)
            group = await scored_group(Draw(index=prompt.id, prompt=prompt), responses, rewards, clock)
            if isinstance(group, Cut):
                raise ended_unasked(f"eval-{prompt.id}")
            ended += 1
            fault_point("driver.evaluated")
            return group

    with waiting("the evaluation", lambda: f"{ended} of {len(prompts)} prompts"):
        groups = await asyncio.gather(*[one(prompt) for prompt in prompts])
    keep(groups)
    return summarize(groups)


def summarize(groups: Sequence[Group]) -> dict[str, float]:
    """Returns accuracy, response length and truncation of evaluated groups."""
    by_source: dict[str, list[float]] = {}
    for group in groups:
        by_source.setdefault(group.draw.prompt.source, []).extend(group.accuracies)
    responses = [response for group in groups for response in group.responses]
    metrics = {
        "eval/accuracy": _mean([accuracy for scored in by_source.values() for accuracy in scored]),
        "eval/response_length_mean": _mean([len(response.token_ids) for response in responses]),
        "eval/truncated": _mean([response.truncated for response in responses]),
        "eval/samples": float(len(responses)),
    }
    if len(by_source) > 1:
        metrics |= {f"eval/{source}/accuracy": _mean(scored) for source, scored in by_source.items()}
    return metrics


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan
