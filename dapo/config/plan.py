"""The section `plan`: the assumptions of `python -m dapo.plan`. It is not part of a run's configuration."""

from dataclasses import dataclass

from dapo.config.devices import PEAK_FLOPS
from dapo.config.fields import at_least, one_of, positive, section, share
from dapo.config.schema import Config

ATTENTION = ("fa2", "fa3")


@dataclass(slots=True)
class PlanConfig:
    """What the planner assumes of machines and lengths. Rates are per second."""

    gpu_memory_bytes: float = positive(80e9, "bytes of one GPU; without GPUs, of the machine")
    overhead_bytes: float = at_least(0, 3e9, "bytes of a rank besides tensors (CUDA context, NCCL, fragments)")
    engine_overhead_bytes: float = at_least(0, 4e9, "the same of an engine, with CUDA graphs")
    host_memory_bytes: float = at_least(0, 1e12, "bytes of a node's memory")
    gpus_per_node: int = positive(8, "GPUs of a node")
    gpu_flops: float = positive(PEAK_FLOPS["H200"], "dense peak of a GPU in `model.dtype`, FLOP/s")
    matrix_share: float = share(0.62, "share of it that matrix products reach")
    attention: str = one_of(ATTENTION, "fa2", "attention of an update, unless `model.attn_implementation` names it")
    layer_s: float = at_least(0, 0.004, "seconds to launch a layer in a pass, not compiled (bounds small models)")
    gpu_bandwidth: float = positive(3.35e12, "byte/s of a GPU's memory")
    memory_share: float = share(0.83, "share of it that elementwise operations reach")
    bandwidth_share: float = share(0.6, "share of it that decoding reaches")
    network_bandwidth: float = positive(50e9, "byte/s of a GPU's network adapter")
    node_bandwidth: float = positive(300e9, "byte/s that a GPU receives within its node")
    engine_step_s: float = at_least(0, 0.003, "seconds that vLLM adds to a decoding step")
    engine_sequence_s: float = at_least(
        0,
        44e-6,
        "CPU seconds of vLLM per token of a sequence (bounds small models)",
    )
    host_bandwidth: float = positive(25e9, "byte/s between a GPU and host memory")
    switch_s: float = at_least(0, 3.0, "seconds of an engine to sleep and wake")
    sync_layer_s: float = at_least(0, 0.01, "seconds of a weight sync per layer, besides its bytes")
    sync_bandwidth: float = positive(42e9, "byte/s at which a GPU checks and loads weights")
    storage_bandwidth: float = positive(2e9, "byte/s of all ranks together to storage")
    mean_prompt_tokens: int = at_least(0, 0, "mean prompt; 0: an eighth of `data.max_prompt_length`")
    mean_response_tokens: int = at_least(0, 0, "mean response; 0: a third of `data.max_response_length`")
    length_sigma: float = positive(0.7, "standard deviation of the log of response lengths")
    mixed_rate: float = share(0.5, "share of groups that are mixed")


@dataclass(slots=True)
class PlannedConfig(Config):
    """A run's configuration together with the planner's assumptions."""

    plan: PlanConfig = section(PlanConfig)
