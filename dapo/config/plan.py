"""The section `plan`: the assumptions of `python -m dapo.plan`. It is not part of a run's configuration."""

from dataclasses import dataclass

from dapo.config.devices import PEAK_FLOPS
from dapo.config.fields import at_least, positive, section, share
from dapo.config.schema import Config


@dataclass(slots=True)
class PlanConfig:
    """The planner assumes machines and response lengths, and computes everything else; rates are per second."""

    gpu_memory_bytes: float = positive(
        80e9, "bytes of one GPU; without GPUs, of the machine, which all ranks and engines share"
    )
    overhead_bytes: float = at_least(
        0, 3e9, "bytes that a rank's process holds besides its tensors (CUDA context, NCCL's buffers, fragments)"
    )
    engine_overhead_bytes: float = at_least(0, 4e9, "the same of an engine, CUDA graphs included")
    host_memory_bytes: float = at_least(
        0, 1e12, "bytes of one node's memory, for what is offloaded and for weights of engines that sleep"
    )
    gpus_per_node: int = positive(8, "GPUs of one node")
    gpu_flops: float = positive(PEAK_FLOPS["H200"], "dense peak of one GPU in `model.dtype`, FLOP/s")
    hfu: float = share(
        0.4,
        "share of it that an update reaches, recomputation counted (hardware FLOPs utilization); measured at 7B: "
        "0.36 to 0.42",
    )
    layer_s: float = at_least(
        0, 0.004, "seconds of its host that a rank takes to launch a layer in a pass, which bounds small models"
    )
    gpu_bandwidth: float = positive(3.35e12, "byte/s of one GPU's memory")
    bandwidth_share: float = share(0.6, "share of it that decoding reaches")
    network_bandwidth: float = positive(
        50e9, "byte/s of one GPU's network adapter; those of a node's GPUs carry a group that fills nodes together"
    )
    node_bandwidth: float = positive(300e9, "byte/s that one GPU receives within its node")
    engine_step_s: float = at_least(
        0, 0.003, "seconds that vLLM adds to each decoding step (scheduling, launches, sampling)"
    )
    engine_sequence_s: float = at_least(
        0,
        44e-6,
        "seconds of its processor that vLLM takes for each token of each sequence, while the GPU computes: what bounds "
        "small models",
    )
    host_bandwidth: float = positive(25e9, "byte/s between one GPU and its host's memory")
    switch_s: float = at_least(
        0, 3.0, "seconds that an engine takes to fall asleep and to wake again, where they share GPUs in turns"
    )
    sync_bandwidth: float = positive(20e9, "byte/s at which weights reach the engines")
    storage_bandwidth: float = positive(2e9, "byte/s at which all ranks together write a checkpoint")
    mean_prompt_tokens: int = at_least(0, 0, "mean length of a prompt; 0: an eighth of `data.max_prompt_length`")
    mean_response_tokens: int = at_least(0, 0, "mean length of a response; 0: a third of `data.max_response_length`")
    length_sigma: float = positive(0.7, "standard deviation of the log of the response length")
    mixed_rate: float = share(0.5, "share of the groups that dynamic sampling keeps")


@dataclass(slots=True)
class PlannedConfig(Config):
    """A run's configuration together with the planner's assumptions."""

    plan: PlanConfig = section(PlanConfig)
