"""Typed configuration: the one place where every default lives (DESIGN section 11).

Hydra composes `config/dapo.yaml` and an experiment over these dataclasses; `dapo.config.checks` checks across fields
before any worker starts. Durations end in `_s`, sizes in `_bytes` or `_tokens`. This module imports no torch and no
Ray.
"""

from dataclasses import dataclass, field
from typing import Any

from dapo.config.algorithm import AlgorithmConfig
from dapo.config.plan import PlanConfig
from dapo.config.reward import RewardConfig

LR_SCHEDULERS = (  # names of transformers' get_scheduler
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
)
ON_BUDGET = ("fail", "train_partial")
ADMISSION = ("draw_order", "completion")
LR_SCHEDULER_UNITS = ("rollout_step", "optimizer_step")
GRADIENT_CHECKPOINTING = ("full", "selective", "none")
TRANSPORTS = ("auto", "object_store", "broadcast", "ipc")
# Logits that `workers.training.logprobs` computes at once, by device. On a CPU smaller chunks lie in its caches but
# make slow matrix products: a thread takes 4.9, 4.4, 4.8 s for 440 tokens at hidden size 896, vocabulary 152k and 2^24,
# 2^25, 2^26 elements; at hidden size 64 all are alike. A GPU needs rows enough that adding a chunk's share to the
# float32 gradient of the weight costs little beside the products.
LOGITS_CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 27}
MISSING = "???"  # OmegaConf's mark of a value that the person must give


@dataclass(slots=True)
class LoraConfig:
    """Low-rank adapters (peft) in place of training all weights. rank: 0 = off. alpha: the adapter counts alpha / rank.

    target_modules: names of the linear layers that get one, as peft takes them; `all-linear` is all but the head.
    """

    rank: int = 0
    alpha: float = 32.0
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])


@dataclass(slots=True)
class ModelConfig:
    """path: a Hugging Face directory or hub name, or `pkg://PACKAGE/DIR` inside an installed package.

    dtype: compute type of the actors' forward and backward and of the engines; master weights are float32.
    attn_implementation: `auto` is packed attention of our own (torch's variable-length kernels on GPU, one SDPA call
    per sequence on CPU); any other name goes to transformers: flash_attention_2, sdpa, ...
    gradient_checkpointing: what the backward pass computes again, per decoder layer: `full` everything, `selective`
    everything but attention and every other matrix product, `none` nothing.
    """

    path: str = MISSING
    dtype: str = "bfloat16"
    trust_remote_code: bool = False
    attn_implementation: str = "auto"
    gradient_checkpointing: str = "full"
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(slots=True)
class DataConfig:
    """Files: local .parquet / .json / .jsonl, `pkg://PACKAGE/FILE`, or a hub data set name, in the DAPO-Math schema.

    train_batch_size: prompts (groups) that one update trains on. gen_batch_size: draws that one generation batch holds;
    it bounds the draws in flight and is the unit of `filter_groups.max_num_gen_batches`. Lengths are in tokens.
    max_contradictory: share of the distinct prompts that may be left out because the files give them ground truths
    that disagree; above it, an error.
    """

    train_files: list[str] = field(default_factory=lambda: [MISSING])
    val_files: list[str] = field(default_factory=list)
    train_batch_size: int = 512
    gen_batch_size: int = 1536
    max_prompt_length: int = 2048
    max_response_length: int = 20480
    max_contradictory: float = 0.1
    shuffle: bool = True


@dataclass(slots=True)
class RolloutConfig:
    """n: responses per prompt. vllm: engine arguments under vLLM's own names, passed through as they are.

    cpu_threads: OpenMP threads of one engine on a machine without GPU. timeout_s: longest wait for one group.
    """

    n: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    num_engines: int = 1
    cpu_threads: int = 1
    start_timeout_s: float = 900.0
    timeout_s: float = 3600.0
    vllm: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class EvalConfig:
    """every: steps between evaluations, 0 = never; before_train and after_train add one at either end.

    n: samples per held-out prompt; the metric is mean@n.
    """

    every: int = 5
    before_train: bool = True
    after_train: bool = True
    n: int = 32
    temperature: float = 1.0
    top_p: float = 0.7
    top_k: int = -1


@dataclass(slots=True)
class FilterGroupsConfig:
    """Dynamic sampling. enable: keep only groups with 0 < correct < n; off, every scored group is trained on.

    max_num_gen_batches: generation batches that one update may draw, 0 = no bound. on_budget: what happens then: `fail`
    stops the run with an error, `train_partial` trains on the usable groups that are there. min_scored: scorable
    responses that a group needs. admission: `draw_order` trains on the first usable groups in the order of the draws;
    `completion` on those that finish first, which favours short responses.

    max_staleness: 0 samples every response from the policy that is updated, and the engines rest during the update;
    above, they go on, and a token may be at most this many updates old when it is trained on
    (`algorithm.rollout_correction` then corrects for it).
    """

    enable: bool = True
    max_num_gen_batches: int = 10
    on_budget: str = "fail"
    min_scored: int = 2
    admission: str = "draw_order"
    max_staleness: int = 0


@dataclass(slots=True)
class OptimConfig:
    """AdamW. lr_scheduler: one of `LR_SCHEDULERS`; lr_scheduler_kwargs: what `get_scheduler` of transformers takes.

    It counts rollout steps or optimizer steps (lr_scheduler_unit), as do lr_warmup_steps and the total, which is
    `trainer.total_steps`. Step k of a warm-up of N runs at lr * k / N, so that the first update moves the weights.
    """

    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    lr_warmup_steps: int = 10
    lr_scheduler: str = "constant_with_warmup"
    lr_scheduler_unit: str = "rollout_step"
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ActorConfig:
    """num_workers: FSDP ranks (one GPU each). ppo_mini_batch_size: prompts per optimizer step. ppo_epochs: how often an
    update goes over its batch. shuffle: deal the groups to the mini-batches by a seeded permutation, and take the
    mini-batches in another order in each epoch; false keeps the order of the draws.

    max_tokens_per_gpu: hard bound on the tokens of one packed micro-batch that one rank computes.
    ulysses_sequence_parallel_size: ranks that share each micro-batch, so that it may hold that many times
    `max_tokens_per_gpu`; attention heads are dealt out over them. fsdp_size: ranks that one copy of the parameters is
    sharded over, -1 = all; with fewer, copies train side by side (HSDP). offload: parameters, gradients and optimizer
    state live in host memory between uses. cpu_threads: threads of one rank that computes on the host: without GPU, and
    with `offload`, whose optimizer steps there. timeout_s: longest update.
    reshard_after_forward: free gathered parameters after the forward pass and reduce gradients in every micro-batch;
    false keeps both until the last micro-batch: fewer collectives, for models that fit.
    """

    num_workers: int = 1
    ppo_mini_batch_size: int = 32
    ppo_epochs: int = 1
    shuffle: bool = True
    max_tokens_per_gpu: int = 22528
    ulysses_sequence_parallel_size: int = 1
    fsdp_size: int = -1
    reshard_after_forward: bool = True
    offload: bool = False
    cpu_threads: int = 1
    start_timeout_s: float = 900.0
    timeout_s: float = 3600.0
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(slots=True)
class WeightSyncConfig:
    """transport: how weights travel. `object_store`: shared memory of Ray. `broadcast`: one process group of actor rank
    0 and all engines, NCCL on GPU, gloo on CPU. `ipc`: CUDA memory that both roles see, where they share GPUs. `auto`:
    ipc with `trainer.colocate`, else broadcast on GPU, object_store on CPU. bucket_bytes: size of one transfer.
    max_mean_logprob_diff: bound on mean |logp(actor) - logp(engine)| of a batch sampled by the current policy; above it
    the run stops before the optimizer step, because the engines sample from other weights than those trained.
    timeout_s: longest sync."""

    transport: str = "auto"
    bucket_bytes: int = 1 << 30
    max_mean_logprob_diff: float = 0.05
    timeout_s: float = 600.0


@dataclass(slots=True)
class CheckpointConfig:
    """every: steps between checkpoints, 0 = only the last. resume: `auto` continues the run in the output directory,
    `never` refuses a directory that holds one. keep: newest checkpoints kept, 0 = all. hf_export: also write the model
    in Hugging Face format."""

    every: int = 5
    resume: str = "auto"
    keep: int = 3
    hf_export: bool = True
    timeout_s: float = 1800.0


@dataclass(slots=True)
class LoggingConfig:
    """tensorboard: scalars and sample texts under OUTPUT_DIR/tensorboard. samples: responses shown per step there.

    worker_logs: also print what the remote workers print; without it their output is in Ray's log directory only."""

    tensorboard: bool = True
    samples: int = 2
    worker_logs: bool = False


@dataclass(slots=True)
class TrainerConfig:
    """device: `cpu`, `cuda`, or `auto` (cuda where the Ray cluster has GPUs). ray_address: `auto` joins a running
    cluster, `local` starts one, empty takes RAY_ADDRESS or else starts one. colocate: engines and actors share GPUs."""

    total_steps: int = 1000
    seed: int = 0
    output_dir: str = "outputs/dapo"
    device: str = "auto"
    ray_address: str = ""
    colocate: bool = False


@dataclass(slots=True)
class Config:
    """The whole tree; its sections are DESIGN section 11's."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
