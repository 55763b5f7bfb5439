"""The sections `model`, `actor` and `weight_sync`: what is trained, how, and how weights reach the engines.

Token budgets are tokens per rank; durations are in seconds (`_s`), sizes in bytes (`_bytes`).
"""

from dataclasses import dataclass
from typing import Any

from dapo.config.fields import MISSING, at_least, key, node_labels, one_of, positive, section

DTYPES = ("float32", "bfloat16", "float16")
HEAD_DTYPES = ("auto", "float32")
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
    """Low-rank adapters (peft) train in place of all weights, and are merged on their way to the engines."""

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
        "the adapter counts alpha / rank",
        "; 2 x `model.lora.rank` is usual",
        verl=f"{MODEL}.lora_alpha, {MODEL}.lora.alpha",
        trl="lora_alpha, LoraConfig.lora_alpha",
    )
    target_modules: list[str] = key(
        ["all-linear"],
        "names of the linear layers that get one, as peft takes them; `all-linear` is all but the head",
        verl=f"{MODEL}.target_modules, {MODEL}.lora.target_modules",
        trl="lora_target_modules, LoraConfig.target_modules",
    )


@dataclass(slots=True)
class ModelConfig:
    """The policy starts as a causal language model in Hugging Face's format."""

    path: str = key(
        MISSING,
        "a Hugging Face directory or hub name, or `pkg://PACKAGE/DIR` inside an installed package",
        verl=f"{MODEL}.path",
        trl="model_name_or_path, GRPOTrainer.model",
    )
    dtype: str = one_of(
        DTYPES,
        "bfloat16",
        "compute type of the actors' forward and backward pass and of the engines; master weights are float32; with "
        "float16, which rounds eight times finer than bfloat16, the loss is scaled, by a factor that adapts itself",
        verl="actor_rollout_ref.rollout.dtype, actor_rollout_ref.actor.fsdp_config.dtype",
        trl="bf16, dtype, torch_dtype",
    )
    head_dtype: str = one_of(
        HEAD_DTYPES,
        "auto",
        "type of the logits, in actors and engines: `auto` is `model.dtype`, whose rounding they then have; `float32` "
        "keeps the sums of the head's product as they are, and the log-probabilities of both differ less",
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
        "`auto` is packed attention of our own (torch's variable-length kernels on GPU, one SDPA call per sequence on "
        "CPU), which computes the prompt of several responses once; any other name goes to transformers, such as "
        "flash_attention_2 or sdpa",
        verl=f"{MODEL}.override_config.attn_implementation",
        trl="attn_implementation, model_init_kwargs",
        resume="harmless",
    )
    gradient_checkpointing: str = one_of(
        GRADIENT_CHECKPOINTING,
        "full",
        "what the backward pass computes again in each decoder layer: `full` everything, `selective` everything but "
        "attention and every other matrix product, `none` nothing",
        verl=f"{MODEL}.enable_gradient_checkpointing",
        trl="gradient_checkpointing",
        resume="harmless",
    )
    lora: LoraConfig = section(LoraConfig)


@dataclass(slots=True)
class OptimConfig:
    """AdamW steps on float32 master weights; step k of a warm-up of N runs at lr * k / N, so that the first one moves
    the weights."""

    lr: float = positive(1e-6, "learning rate at its peak", verl=f"{ACTOR}.optim.lr", trl="learning_rate")
    betas: list[float] = key(
        [0.9, 0.999],
        "decay of the first and of the second moment",
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
        0, 10, "steps of the warm-up, in `lr_scheduler_unit`", verl=f"{ACTOR}.optim.lr_warmup_steps", trl="warmup_steps"
    )
    lr_scheduler: str = one_of(
        LR_SCHEDULERS,
        "constant_with_warmup",
        "schedule under transformers' name",
        verl=f"{ACTOR}.optim.lr_scheduler_type",
        trl="lr_scheduler_type",
    )
    lr_scheduler_unit: str = one_of(
        LR_SCHEDULER_UNITS,
        "rollout_step",
        "what the schedule counts, over `trainer.total_steps`: rollout steps or optimizer steps",
    )
    lr_scheduler_kwargs: dict[str, Any] = key(
        {}, "further arguments of transformers' `get_scheduler`", trl="lr_scheduler_kwargs"
    )


@dataclass(slots=True)
class ActorConfig:
    """FSDP2 ranks train the policy, one GPU each."""

    num_workers: int = at_least(1, 1, "FSDP ranks", verl="trainer.n_gpus_per_node, trainer.nnodes", resume="harmless")
    max_restarts: int = at_least(
        0,
        5,
        "restarts of all ranks within an hour, or until a step is trained that was not before, after one died, hung or "
        "left the others; each goes on from the newest checkpoint; with one more the run ends",
        resume="harmless",
    )
    ppo_mini_batch_size: int = at_least(
        1,
        32,
        "prompts (groups) per optimizer step; divides `data.train_batch_size`",
        verl=f"{ACTOR}.ppo_mini_batch_size",
    )
    ppo_epochs: int = at_least(
        1, 1, "how often an update goes over its batch", verl=f"{ACTOR}.ppo_epochs", trl="num_iterations"
    )
    shuffle: bool = key(
        True,
        "deal the groups to the mini-batches by a seeded permutation, and take the mini-batches in another order in "
        "each epoch; false keeps the order of the draws",
        verl=f"{ACTOR}.shuffle",
    )
    max_tokens_per_gpu: int = at_least(
        1,
        22528,
        "hard bound on the tokens of one packed micro-batch that one rank computes; a prompt that responses share "
        "counts for each of them",
        verl=f"{ACTOR}.ppo_max_token_len_per_gpu",
        resume="harmless",
    )
    ulysses_sequence_parallel_size: int = key(
        1,
        "ranks that share each micro-batch, which may then hold that many times `max_tokens_per_gpu`; attention heads "
        "are split over them; divides `num_workers`",
        verl=f"{ACTOR}.ulysses_sequence_parallel_size",
        resume="harmless",
    )
    fsdp_size: int = key(
        -1,
        "ranks that one copy of the parameters is sharded over; -1: all; fewer: copies train side by side (HSDP); "
        "divides `num_workers`",
        verl=f"{ACTOR}.fsdp_config.fsdp_size",
        resume="harmless",
    )
    reshard_after_forward: bool = key(
        True,
        "free gathered parameters after the forward pass and reduce gradients in every micro-batch; false keeps both "
        "until the last micro-batch: fewer collectives, for models that fit",
        verl=f"{ACTOR}.fsdp_config.reshard_after_forward",
        resume="harmless",
    )
    offload: str = one_of(
        OFFLOADS,
        "none",
        "what lives in host memory: `host`, parameters, gradients and optimizer state, with the optimizer's step; "
        "`phase`, the optimizer state between updates, with `trainer.colocate=time` or lend; true: host; false: none",
        verl=f"{ACTOR}.fsdp_config.param_offload, {ACTOR}.fsdp_config.optimizer_offload",
        resume="harmless",
    )
    cpu_threads: int = at_least(
        1,
        1,
        "threads of a rank that computes on the host: without GPU, or the optimizer's step with `offload=host`",
        resume="harmless",
    )
    start_timeout_s: float = positive(
        900.0, "longest start of the ranks in seconds, loading included", resume="harmless"
    )
    timeout_s: float = positive(3600.0, "longest update in seconds", resume="harmless")
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
        "`broadcast`: one process group of actor rank 0 and all engines, NCCL on GPU, gloo on CPU; `ipc`: CUDA memory "
        "that both roles see, on the same GPUs; `auto`: ipc with `trainer.colocate=time`, else broadcast",
    )
    bucket_bytes: int = at_least(
        1,
        1 << 30,
        "bytes of one transfer",
        verl=f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes, {ROLLOUT}.update_weights_bucket_megabytes",
    )
    max_mean_logprob_diff: float = positive(
        0.05,
        "bound on the mean of |log-probability of the actors - of the engines| of a batch sampled by the current "
        "policy, in nats; above it the batch is set aside before the optimizer step, because the engines sample from "
        "other weights than those trained, and three batches in a row end the run",
    )
    compare_every: int = at_least(
        0,
        10,
        "steps between measurements of where the difference of log-probabilities between engines and actors comes from "
        "(metrics `mismatch/`)",
        "; 0: none",
        resume="harmless",
    )
    timeout_s: float = positive(600.0, "longest sync in seconds")
