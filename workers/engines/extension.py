"""Loaded into vLLM's worker processes as `worker_extension_cls`: adds the weight receiver and, on a CPU, a replacement
for one kernel of speculative decoding. If the engine is a single process, this is imported before the scheduler is
made.

Without Triton, vLLM 0.32 uses its own kernels in the rejection sampler. Its `expand_kernel`, which repeats a request's
temperature for each drafted token, writes into a copy, so the sampler divides logits by uninitialised memory.
"""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels

from dapo.workers.engines.arguments import DRAWN
from dapo.workers.engines.orphans import end_with_actor
from dapo.workers.layer_outputs import LayerOutputs
from dapo.workers.weights.receiver import WeightReceiverExtension

EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"


class EngineExtension(WeightReceiverExtension):
    """Mixed into vLLM's worker class. vLLM finds it by name, and so imports this module in the worker."""

    available_kv_cache_memory_bytes: int  # set on a GPU, unless the size was configured
    model_runner: Any
    get_model: Callable[[], nn.Module]

    def measured_cache_bytes(self) -> int:
        """Returns the bytes vLLM found available for KV cache on this GPU; 0 if it did not measure."""
        return int(getattr(self, "available_kv_cache_memory_bytes", 0))

    def add_experts(self) -> None:
        """Has the model runner of a CPU return each token's experts through vLLM's own connector, as that of a GPU does
        (`enable_return_routed_experts`)."""
        from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

        runner = self.model_runner
        connector = AuxOutputWorkerConnector(
            vllm_config=self.vllm_config, model=runner.model, kv_cache_config=runner.kv_cache_config
        )
        execute, sample = runner.execute_model, runner.sample_tokens
        step: dict[str, Any] = {}

        def execute_model(scheduled: Any, *args: Any) -> Any:
            connector.begin_step(scheduled.aux_output_connector_metadata)
            output = execute(scheduled, *args)
            if scheduled.total_num_scheduled_tokens:
                batch, count = runner.input_batch, runner.input_batch.num_reqs
                step["pending"] = connector.prepare_output(
                    SimpleNamespace(
                        req_ids=batch.req_ids[:count],
                        query_start_loc_np=runner.query_start_loc.np[: count + 1].copy(),
                        num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
                    )
                )
                step["drafted"] = scheduled.scheduled_spec_decode_tokens
            return output

        def sample_tokens(*args: Any) -> Any:
            output = sample(*args)
            if (pending := step.pop("pending", None)) is not None:
                sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
                drafted = np.array([len(step["drafted"].get(name, ())) for name in output.req_ids])
                pending.enqueue_cpu_copy(sampled, np.where(drafted > 0, drafted + 1 - sampled, 0))
                output.aux_output_connector_output = pending.process_output()
            return output

        runner.execute_model, runner.sample_tokens = execute_model, sample_tokens

    def go_on_with_noise(self) -> None:
        """Lets a response that another engine has begun go on with its random numbers. This runner draws one number for
        each token from a generator of the request."""
        batch = self.model_runner.input_batch
        add = batch.add_request

        def add_request(request: Any) -> Any:
            drawn = (request.sampling_params.extra_args or {}).pop(DRAWN, 0)  # a request may be added again
            torch.randint(0, 2**31, (drawn,), generator=request.generator)
            return add(request)

        batch.add_request = add_request

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
