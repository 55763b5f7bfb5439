"""Measures the resource use of an update: memory of each rank, and model FLOPs utilisation (metrics of `perf/rank/`).

MFU = model FLOPs / (seconds × GPUs × peak FLOP/s, `dapo.config.devices`). Model FLOPs of an optimizer step = 3 × the
forward pass (`dapo.config.facts.model_shape`: matrices 2 FLOPs per weight and token, the head at response tokens only,
causal attention at half of its square), the backward pass counting twice; 2 × with LoRA, where the model's matrices get
no gradient. Recomputation by checkpointing, and old or reference log-probabilities, do not count. A prompt counts for
each of its responses, also where it is computed once for several.
"""

from collections.abc import Sequence

import psutil
import torch

from dapo.config.devices import peak_flops
from dapo.config.facts.model_shape import ModelShape
from dapo.measure.usage import RankUse, resident_bytes
from dapo.types import TrainBatch


def begin_use(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def end_use(device: str) -> RankUse:
    """Returns the memory use of this process since `begin_use`."""
    resident = resident_bytes([psutil.Process()])
    if device != "cuda":
        return RankUse(resident_bytes=resident)
    peak = torch.cuda.max_memory_allocated()
    return RankUse(resident_bytes=resident, device=torch.cuda.get_device_name(), gpu_peak_bytes=peak)


def model_flops(batch: TrainBatch, shape: ModelShape, *, lora: bool) -> float:
    """Returns the FLOPs of all optimizer steps, as defined in the module's docstring."""
    forward = []
    for minibatch in batch.minibatches:
        tokens = sum(len(sequence.rollout_logprobs) for sequence in minibatch)
        lengths = [len(sequence.token_ids) for sequence in minibatch]
        forward.append(shape.forward_flops(lengths, head_tokens=tokens))
    return (2 if lora else 3) * sum(forward[k] for k in batch.order)


def rank_metrics(
    uses: Sequence[RankUse], batch: TrainBatch, seconds: float, shape: ModelShape | None, *, lora: bool
) -> dict[str, float]:
    """Returns the metrics of an update. uses: of all ranks. seconds: its duration. shape: None if unknown."""
    metrics = {"perf/rank/resident_bytes": float(max(use.resident_bytes for use in uses))}
    if uses[0].device:
        tokens = sum(len(sequence.token_ids) for minibatch in batch.minibatches for sequence in minibatch)
        metrics["perf/rank/gpu_peak_bytes"] = float(max(use.gpu_peak_bytes for use in uses))
        metrics["perf/rank/tokens_per_s_per_gpu"] = tokens / (seconds * len(uses))
    peaks = [peak_flops(use.device) for use in uses]
    if shape is not None and None not in peaks:
        peak = sum(each for each in peaks if each is not None)
        metrics["perf/rank/mfu"] = model_flops(batch, shape, lora=lora) / (seconds * peak)
    return metrics
