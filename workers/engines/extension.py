"""Loaded into vLLM's worker processes as `worker_extension_cls`: adds the weight receiver and, on a CPU, a replacement
for one kernel of speculative decoding. If the engine is a single process, this is imported before the scheduler is
made.

Without Triton, vLLM 0.32 uses its own kernels in the rejection sampler. Its `expand_kernel`, which repeats a request's
temperature for each drafted token, writes into a copy, so the sampler divides logits by uninitialised memory.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels

from workers.engines.orphans import end_with_actor
from workers.layer_outputs import LayerOutputs
from workers.weights.receiver import WeightReceiverExtension

EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"


class EngineExtension(WeightReceiverExtension):
    """Mixed into vLLM's worker class. vLLM finds it by name, and so imports this module in the worker."""

    available_kv_cache_memory_bytes: int  # set on a GPU, unless the size was configured
    get_model: Callable[[], nn.Module]

    def measured_cache_bytes(self) -> int:
        """Returns the bytes vLLM found available for KV cache on this GPU; 0 if it did not measure."""
        return int(getattr(self, "available_kv_cache_memory_bytes", 0))

    def record_layers(self) -> None:
        self._layers = LayerOutputs(self.get_model())

    def recorded_layers(self) -> dict[str, tuple[int, bytes]]:
        """Returns (width, float32 rows) by module, of all tokens computed since `record_layers`."""
        return {name: (rows.shape[1], rows.numpy().tobytes()) for name, rows in self._layers.take().items()}


def expand(
    output: Tensor, values: Tensor, ends: Tensor, replace_from: float, replace_to: float, max_num_tokens: int = 0
) -> None:
    """Writes values [B] into output [T]: value b where ends[b - 1] <= t < ends[b]. ends: [B]; the last one is T."""
    replaced = torch.where(values == replace_from, replace_to, values)
    output.copy_(replaced.repeat_interleave(ends.diff(prepend=ends.new_zeros(1))))


# Drop the warning that a custom scheduler may break with a new vLLM: `check_version` guards against that.
logging.getLogger("vllm.config.scheduler").addFilter(lambda record: "custom scheduler class" not in str(record.msg))
if not HAS_TRITON:  # on a CPU
    register_kernels({EXPAND: expand})
end_with_actor()
