"""Stands in vLLM's worker processes, which import it as `worker_extension_cls`: the receiver of weights, and on a CPU a
kernel of speculation. Where the engine is one process, it is imported before the scheduler is made.

Without Triton vLLM 0.32 has kernels of its own for the rejection sampler. The one that repeats a request's temperature
for each of its drafted tokens fills a copy, and the sampler divides logits by memory that nobody has written.
"""

import logging

import torch
from torch import Tensor
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels

from workers.engines.orphans import end_with_actor
from workers.weights.receiver import WeightReceiverExtension

EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"


class EngineExtension(WeightReceiverExtension):
    """Adds to vLLM's worker class, which it is mixed into; its name makes vLLM import this module there."""

    available_kv_cache_memory_bytes: int  # on a GPU, unless vLLM was told

    def measured_cache_bytes(self) -> int:
        """Returns the bytes of KV cache that vLLM found room for on this GPU; 0 where it did not measure."""
        return int(getattr(self, "available_kv_cache_memory_bytes", 0))


def expand(
    output: Tensor, values: Tensor, ends: Tensor, replace_from: float, replace_to: float, max_num_tokens: int = 0
) -> None:
    """Writes values [B] into output [T], value b where ends[b - 1] <= t < ends[b]; ends: [B], the last one is T."""
    replaced = torch.where(values == replace_from, replace_to, values)
    output.copy_(replaced.repeat_interleave(ends.diff(prepend=ends.new_zeros(1))))


# It warns that a scheduler of one's own may not fit the next vLLM; `check_version` stands before that.
logging.getLogger("vllm.config.scheduler").addFilter(lambda record: "custom scheduler class" not in str(record.msg))
if not HAS_TRITON:  # on a CPU, that is
    register_kernels({EXPAND: expand})
end_with_actor()
