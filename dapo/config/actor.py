"""The sections `model`, `actor` and `weight_sync`: what is trained, how, and how weights reach the engines.

Token budgets are tokens per rank; durations are in seconds (`_s`), sizes in bytes (`_bytes`).
"""

from dataclasses import dataclass
from typing import Any

from dapo.config.fields import MISSING, at_least, key, node_labels, one_of, positive, section

DTYPES = ("float32", "bfloat16", "float16")
HEAD_DTYPES = ("auto", "float32")
PACKED_ATTENTION = ("auto", "fa2", "fa3")
GRADIENT_CHECKPOINTING = ("full", "selective", "none")
LR_SCHEDULERS = (  # names of transformers' get_scheduler
    *("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr"),
    *("polynomial", "inverse_sqrt", "warmup_stable_decay"),
)
LR_SCHEDULER_UNITS = ("rollout_step", "optimizer_step")
OFFLOADS = ("none", "host", "phase")
BY_SWITCH = {"True": "host", "False": "none"}  # `true` and `false`, the values of earlier versions
TRANSPORTS = ("auto", "broadcast", "ipc")
MODEL, ACTOR, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))  # of verl's names


@dataclass(slots=True)
class LoraConfig:
    """Low-rank adapters (peft) train in place of all weights, and are merged for the engines."""

    rank: int = at_least(
        0,
        0,
        "rank of the adapters",
        "; 0 is off, 8 to 64 are usual",
        verl=f"{MODEL}.lora_rank, {MODEL}.lora.rank",
        trl="lora_r, LoraConfig.r",
    )
    alpha: float = positive(
        32.0,
        "an adapter counts alpha / rank",
        "; 2 x `model.lora.rank` is usual",
        verl=f"{MODEL}.lora_alpha, {MODEL}.lora.alpha",
        trl="lora_alpha, LoraConfig.lora_alpha",
    )
    target_modules: list[str] = key(
        ["all-linear"],
        "layers with an adapter, as peft names them; `all-linear`: all but the head",
        verl=f"{MODEL}.target_modules, {MODEL}.lora.target_modules",
        trl="lora_target_modules, LoraConfig.target_modules",
    )


@dataclass(slots=True)
class ModelConfig:
    """The policy starts as a causal language model in Hugging Face's format."""

    path: str = key(
        MISSING,
        "directory, hub name, or `pkg://PACKAGE/DIR` in an installed package",
        verl=f"{MODEL}.path",
        trl="model_name_or_path, GRPOTrainer.model",
    )
    dtype: str = one_of(
        DTYPES,
        "bfloat16",
        "compute type of actors and engines; master weights are float32",
        verl="actor_rollout_ref.rollout.dtype, actor_rollout_ref.actor.fsdp_config.dtype",
        trl="bf16, dtype, torch_dtype",
    )
    head_dtype: str = one_of(
        HEAD_DTYPES,
        "auto",
        "type of the logits; `auto`: `model.dtype`; `float32`: actors and engines differ less",
        resume="course",
    )
    trust_remote_code: bool = key(
        False,
        "run the model's own Python code",
        verl=f"{MODEL}.trust_remote_code, data.trust_remote_code",
        trl="trust_remote_code",
        resume="harmless",
    )
    attn_implementation: str = key(
        "auto",
        "packed attention that computes a shared prompt once, by `auto`: the fastest kernel that is there, `fa2`: "
        "FlashAttention 2, or `fa3`: 3 (Hopper, package flash_attn_interface); else a name for transformers",
        verl=f"{MODEL}.override_config.attn_implementation",
        trl="attn_implementation, model_init_kwargs",
        resume="harmless",
    )
    gradient_checkpointing: str = one_of(
        GRADIENT_CHECKPOINTING,
        "full",
        "what the backward pass computes again: `full`: all; `selective`: all but attention and half of the "
        "matrix products; `none`",
        verl=f"{MODEL}.enable_gradient_checkpointing",
        trl="gradient_checkpointing",
        resume="harmless",
    )
    lora: LoraConfig = section(LoraConfig)


@dataclass(slots=True)
class OptimConfig:
    """AdamW on float32 master weights. Step k of N warm-up steps has the rate lr * k / N."""

    lr: float = positive(1e-6, "peak learning rate", verl=f"{ACTOR}.optim.lr", trl="learning_rate")
    betas: list[float] = key(
        [0.9, 0.999],
        "decay of both moments",
        values="two numbers in [0, 1)",
        holds=lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        verl=f"{ACTOR}.optim.betas",
        trl="adam_beta1, adam_beta2",
    )
    eps: float = positive(1e-8, "added to the root of the second moment", trl="adam_epsilon")
    weight_decay: float = at_least(
        0, 0.1, "decoupled weight decay", verl=f"{ACTOR}.optim.weight_decay", trl="weight_decay"
    )
    grad_clip: float = positive(
        1.0,
        "largest norm of the whole gradient",
        verl=f"{ACTOR}.grad_clip, {ACTOR}.optim.clip_grad",
        trl="max_grad_norm",
    )
    lr_warmup_steps: int = at_least(
        0,
        10,
        "length of the warm-up, in `lr_scheduler_unit`",
        verl=f"{ACTOR}.optim.lr_warmup_steps",
        trl="warmup_steps",
    )
    lr_scheduler: str = one_of(
        LR_SCHEDULERS,
        "constant_with_warmup",
        "schedule of transformers",
        verl=f"{ACTOR}.optim.lr_scheduler_type",
        trl="lr_scheduler_type",
    )
    lr_scheduler_unit: str = one_of(
        LR_SCHEDULER_UNITS,
        "rollout_step",
        "what the schedule counts",
    )
    lr_scheduler_kwargs: dict[str, Any] = key(
        {}, "arguments of transformers' `get_scheduler`", trl="lr_scheduler_kwargs"
    )


@dataclass(slots=True)
class ActorConfig:
    """FSDP2 ranks train the policy."""

    num_workers: int = at_least(
        1, 1, "FSDP ranks, one GPU each", verl="trainer.n_gpus_per_node, trainer.nnodes", resume="harmless"
    )
    max_restarts: int = at_least(
        0,
        5,
        "restarts of all ranks within an hour; one more ends the run",
        resume="harmless",
    )
    ppo_mini_batch_size: int = at_least(
        1,
        32,
        "groups per optimizer step; divides `data.train_batch_size`",
        verl=f"{ACTOR}.ppo_mini_batch_size",
    )
    ppo_epochs: int = at_least(
        1, 1, "passes of an update over its batch", verl=f"{ACTOR}.ppo_epochs", trl="num_iterations"
    )
    shuffle: bool = key(
        True,
        "deal groups to mini-batches by a seeded permutation; false: in draw order",
        verl=f"{ACTOR}.shuffle",
    )
    max_tokens_per_gpu: int = at_least(
        1,
        22528,
        "most tokens of a micro-batch on one rank",
        verl=f"{ACTOR}.ppo_max_token_len_per_gpu",
        resume="harmless",
    )
    ulysses_sequence_parallel_size: int = key(
        1,
        "ranks that share a micro-batch, split by attention heads; divides `num_workers`",
        verl=f"{ACTOR}.ulysses_sequence_parallel_size",
        resume="harmless",
    )
    fsdp_size: int = key(
        -1,
        "ranks that share one copy of the parameters; -1: all; fewer: HSDP; divides `num_workers`",
        verl=f"{ACTOR}.fsdp_config.fsdp_size",
        resume="harmless",
    )
    reshard_after_forward: bool = key(
        True,
        "free gathered parameters after the forward pass; false: faster, for models that fit",
        verl=f"{ACTOR}.fsdp_config.reshard_after_forward",
        resume="harmless",
    )
    compile: bool = key(
        False,
        "compile each decoder layer with torch.compile: a start of seconds to minutes, faster on GPUs",
        resume="harmless",
    )
    offload: str = one_of(
        OFFLOADS,
        "none",
        "in host memory: `host`: all state, and the optimizer's step; `phase`: optimizer state between "
        "updates (with `trainer.colocate`); `none`",
        verl=f"{ACTOR}.fsdp_config.param_offload, {ACTOR}.fsdp_config.optimizer_offload",
        resume="harmless",
    )
    cpu_threads: int = at_least(
        1,
        1,
        "threads of a rank on the CPU, or of its optimizer with `offload=host`",
        resume="harmless",
    )
    start_timeout_s: float = positive(900.0, "longest start of the ranks", resume="harmless")
    timeout_s: float = positive(3600.0, "longest update", resume="harmless")
    node_labels: dict[str, str] = node_labels("a rank")
    optim: OptimConfig = section(OptimConfig, resume="course")

    def __post_init__(self) -> None:
        self.offload = BY_SWITCH.get(self.offload, self.offload)


@dataclass(slots=True)
class WeightSyncConfig:
    """Weights travel from the actors to the engines after each update."""

    transport: str = one_of(
        TRANSPORTS,
        "auto",
        "`broadcast`: NCCL or gloo; `ipc`: shared CUDA memory; `auto`: ipc with `trainer.colocate=time`, else "
        "broadcast",
    )
    bucket_bytes: int = at_least(
        1,
        1 << 30,
        "bytes of one transfer",
        verl=f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes, {ROLLOUT}.update_weights_bucket_megabytes",
    )
    keep_kv_cache: bool = key(
        False,
        "keep the keys and values of running requests through a sync, although they are of the old weights; needs "
        "`filter_groups.max_staleness` and a correction",
        resume="course",
    )
    max_mean_logprob_diff: float = positive(
        0.05,
        "largest mean difference of log-probabilities between actors and engines, in nats; above it a batch "
        "is set aside",
    )
    compare_every: int = at_least(
        0,
        10,
        "steps between measurements of the causes of that difference (metrics `mismatch/`)",
        "; 0: none",
        resume="harmless",
    )
    store: str = key(
        "",
        "folder or URL of fsspec (s3://...) of this run alone, where engines outside of the cluster "
        "(`rollout.outside`) find the weights",
        resume="harmless",
    )
    timeout_s: float = positive(600.0, "longest sync")
