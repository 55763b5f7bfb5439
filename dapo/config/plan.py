"""The section `plan` of the configuration: what `python -m dapo.plan` assumes. No run reads it."""

from dataclasses import dataclass


@dataclass(slots=True)
class PlanConfig:
    """gpu_memory_bytes: of one GPU; without GPUs, of the machine, which all ranks and engines share. overhead_bytes:
    what a rank's process holds beside its tensors (CUDA context, NCCL's buffers, fragments); engine_overhead_bytes:
    likewise of an engine, CUDA graphs included. host_memory_bytes, gpus_per_node: of one node, for what is offloaded.

    gpu_flops: dense peak of one GPU in `model.dtype`, FLOP/s. hfu: share of it that an update reaches, recomputation
    counted (hardware FLOPs utilization). gpu_bandwidth: of one GPU's memory, byte/s; bandwidth_share: of it that
    decoding reaches. network_bandwidth, node_bandwidth: byte/s that one GPU receives from other nodes, and within its
    own. engine_step_s: what vLLM adds to each decoding step (scheduling, launches, sampling). sync_bandwidth: byte/s at
    which weights reach the engines.

    mean_prompt_tokens, mean_response_tokens: 0 = an eighth of `data.max_prompt_length`, a third of
    `data.max_response_length`. length_sigma: of the log of the response length. mixed_rate: share of the groups that
    dynamic sampling keeps.
    """

    gpu_memory_bytes: float = 80e9
    overhead_bytes: float = 3e9
    engine_overhead_bytes: float = 4e9
    host_memory_bytes: float = 1e12
    gpus_per_node: int = 8
    gpu_flops: float = 989e12
    hfu: float = 0.5
    gpu_bandwidth: float = 3.35e12
    bandwidth_share: float = 0.6
    network_bandwidth: float = 50e9
    node_bandwidth: float = 300e9
    engine_step_s: float = 0.003
    sync_bandwidth: float = 20e9
    mean_prompt_tokens: int = 0
    mean_response_tokens: int = 0
    length_sigma: float = 0.7
    mixed_rate: float = 0.5
