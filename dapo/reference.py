"""Takes the distance to the reference policy off the rewards of a batch, before its advantages are computed.

In: groups of a full batch. Out: the same groups with the reward part "kl_penalty". Accuracies, and so the buffer's
choice, stay.
"""

from dataclasses import replace

from dapo.batch import penalize_kl, reference_batch
from dapo.config.schema import Config
from dapo.pools import ActorPool
from dapo.types import Collected


async def penalized(collected: Collected, actors: ActorPool, cfg: Config, *, version: int) -> Collected:
    """Returns what was collected, with the rewards of its groups penalized. version: that the update starts from."""
    logprobs = await actors.reference_logprobs(reference_batch(collected.groups, version=version))
    return replace(collected, groups=penalize_kl(collected.groups, logprobs, cfg))
