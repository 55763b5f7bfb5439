"""The section `reward` of the configuration: functions, their limits, the overlong rules (DESIGN section 6).

Like all of the configuration it imports no torch and no Ray.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RewardFunctionConfig:
    """A function with verl's signature. path: a Python file, a dotted module, or a ready one: `math`, `math_verify`,
    `gsm8k`, `format`, `overlong`. weight: factor of its score. kwargs: given to it by keyword, beside verl's arguments.

    wrong: its score for a response whose scoring reached the CPU or memory limit; its worst, so that it never pays.
    """

    path: str = "math"
    name: str = "compute_score"
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)
    wrong: float = -1.0


@dataclass(slots=True)
class LimitsConfig:
    """Of the child processes that score. cpu_s, memory_bytes: of one response, beyond them it is wrong; memory counts
    above what the process has after its imports. wall_s: longest verdict; then the child is killed and the response
    tried once more elsewhere; then it is wrong, as at its CPU limit, if the child still computed, else unscorable.
    file_bytes: largest file that a function may write.

    allow_network, allow_processes: for functions that ask a server or start programs.
    """

    cpu_s: float = 2.0
    wall_s: float = 10.0
    memory_bytes: int = 512 << 20
    file_bytes: int = 1 << 20
    allow_network: bool = False
    allow_processes: bool = False


@dataclass(slots=True)
class OverlongBufferConfig:
    """Soft Overlong Punishment (Eq. 13): the last `len` tokens below the cap are punished by up to `penalty_factor`."""

    enable: bool = True
    len: int = 4096
    penalty_factor: float = 1.0


@dataclass(slots=True)
class OverlongFilteringConfig:
    """Overlong filtering (section 3.4 of the paper): truncated responses leave the loss, numerator and denominator.

    in_baseline: their rewards stay in the group's mean and standard deviation; false takes them out there too.
    """

    enable: bool = False
    in_baseline: bool = True


@dataclass(slots=True)
class RewardModelConfig:
    """A Hugging Face sequence-classification model with one label, whose score joins the reward with factor `weight`.

    path: as `model.path`; empty: none. num_workers: copies of the model. dtype: `auto` is bfloat16 on a GPU, float32
    without. device: `auto` follows `trainer.device`. num_gpus: share of a GPU that a copy holds, at most 1.
    max_length: longest conversation, in tokens of the model's own tokenizer; a longer one is never cut but unscorable.
    0: what model and tokenizer declare. max_tokens: hard bound on the padded tokens of one forward pass, and so of a
    conversation. timeout_s: longest call of a worker, of about four passes; then it is replaced. cpu_threads: threads
    of a copy without GPU.
    """

    path: str = ""
    weight: float = 1.0
    num_workers: int = 1
    dtype: str = "auto"
    device: str = "auto"
    num_gpus: float = 1.0
    max_length: int = 0
    max_tokens: int = 32768
    trust_remote_code: bool = False
    cpu_threads: int = 1
    timeout_s: float = 600.0


@dataclass(slots=True)
class RewardConfig:
    """num_workers: Ray actors that score, each with `children_per_worker` processes. timeout_s: longest silence of a
    worker that has something to score; then it is replaced and its responses are tried once more."""

    functions: list[RewardFunctionConfig] = field(default_factory=lambda: [RewardFunctionConfig()])
    num_workers: int = 8
    children_per_worker: int = 2
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    timeout_s: float = 60.0
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    overlong_filtering: OverlongFilteringConfig = field(default_factory=OverlongFilteringConfig)
