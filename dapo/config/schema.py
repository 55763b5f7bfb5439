"""The configuration tree and its smallest sections. Each default and its meaning are declared at one field.

Hydra composes `config/dapo.yaml` and an experiment over these dataclasses; `dapo.config.checks` checks the result
before any worker starts. config/README.md lists every key. Durations end in `_s`, sizes in `_bytes` or `_tokens`.
"""

import re
from dataclasses import dataclass
from typing import Any

from dapo.config.actor import ActorConfig, ModelConfig, WeightSyncConfig
from dapo.config.algorithm import AlgorithmConfig
from dapo.config.fields import at_least, key, one_of, positive, section
from dapo.config.reward import DEVICES, RewardConfig
from dapo.config.sampling import DataConfig, EvalConfig, FilterGroupsConfig, RolloutConfig

RESUME = ("auto", "never")
HALVES = ("both", "rollout", "train")
MAX_SEED = (1 << 32) - 1  # numpy's
COLOCATIONS = ("none", "time", "lend")
# Logits that `workers.training.forward.logprobs` computes at once, by device. On a CPU smaller chunks fit the caches,
# but their matrix products are slow: one thread takes 4.9, 4.4, 4.8 s with 2^24, 2^25, 2^26 elements (440 tokens,
# hidden size 896, vocabulary 152k). A GPU needs enough rows that adding to the float32 weight gradient costs little.
LOGITS_CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 27}


@dataclass(slots=True)
class CheckpointConfig:
    """A checkpoint holds what a run needs to continue, and the model in Hugging Face's format."""

    every: int = at_least(
        0, 5, "steps between checkpoints", "; 0: only the last", verl="trainer.save_freq", trl="save_steps"
    )
    every_s: float = at_least(0, 0.0, "seconds after which the next step is saved", "; 0: none")
    resume: str = key(
        "auto",
        "`auto`: continue the run in the output directory; `never`: refuse to; a `step_*` directory: start there",
        values="auto, never, or a path whose last part is step_ and at least six digits",
        holds=lambda value: value in RESUME or re.search(r"(^|/)step_\d{6,}/?$", value) is not None,
        verl="trainer.resume_mode, trainer.resume_from_path",
        trl="resume_from_checkpoint",
    )
    accept_changes: list[str] = key(
        [],
        "keys or sections that may change in a continued run",
    )
    keep: int = at_least(
        0, 3, "newest checkpoints kept", "; 0: all", verl="trainer.max_actor_ckpt_to_keep", trl="save_total_limit"
    )
    hf_export: bool = key(True, "write the model for Hugging Face too, in `hf/`")
    push_to_hub: str = key(
        "",
        "OWNER/NAME on the hub that gets `hf/`; a new one is private; needs HF_TOKEN or `hf auth login`",
        values="empty, or OWNER/NAME",
        holds=lambda value: not value or re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", value) is not None,
        trl="push_to_hub, hub_model_id",
    )
    async_save: bool = key(
        False,
        "write while training continues, from a copy in host memory",
        verl="actor_rollout_ref.actor.checkpoint.async_save",
    )
    memory_copies: int = key(
        0,
        "copies of the ranks' state after each step, from which lost ranks continue, in the nodes' memory (Ray's "
        "object store); 2: one of them on another node",
        values="0, 1 or 2; 0: lost ranks continue from the newest checkpoint",
        holds=lambda value: value in (0, 1, 2),
    )
    timeout_s: float = positive(1800.0, "longest save")
    max_failed_saves: int = at_least(0, 3, "saves in a row that may fail")
    journal: bool = key(True, "write finished groups between checkpoints")
    batches: int = at_least(
        0,
        20,
        "last steps whose batches are kept, for `dapo replay`",
        "; 0: none",
    )


@dataclass(slots=True)
class LoggingConfig:
    """Beside `metrics.jsonl` and `samples.sqlite`, which are always written."""

    tensorboard: bool = key(True, "scalars and sample texts", verl="trainer.logger", trl="report_to")
    samples: int = at_least(
        0, 2, "responses shown there per step", verl="trainer.log_val_generations", trl="num_completions_to_print"
    )
    wandb: dict[str, Any] = key(
        {},
        "Weights & Biases: arguments of `wandb.init` (`logging.wandb.project=dapo`); empty: off",
        verl="trainer.logger, trainer.project_name, trainer.experiment_name",
        trl="report_to",
    )
    mlflow: dict[str, Any] = key(
        {},
        "MLflow: `tracking_uri`, optionally `experiment`, `run_name`; empty: off",
        verl="trainer.logger",
        trl="report_to",
    )
    prometheus: bool = key(
        False,
        "gauges `ray_dapo_*` on Ray's endpoints; needs `ray[default]`",
    )
    watchdog_s: float = positive(
        60.0,
        "seconds until a wait is reported, and between reports",
    )
    sample_fraction: float = key(
        1.0,
        "share of groups whose texts are kept in `samples.sqlite`",
        values="from 0 to 1",
        holds=lambda value: 0 <= value <= 1,
    )
    max_text_bytes: int = at_least(0, 32_768, "longest text kept there", "; 0: no texts")
    max_store_bytes: int = at_least(
        0,
        50_000_000_000,
        "largest `samples.sqlite`; above it the oldest texts go",
        "; 0: no limit",
    )
    worker_logs: bool = key(False, "print what remote workers print")


@dataclass(slots=True)
class TrainerConfig:
    """The driver runs the algorithm on one machine of a Ray cluster."""

    total_steps: int = at_least(
        1, 1000, "updates of the run", verl="trainer.total_training_steps", trl="max_steps", resume="harmless"
    )
    seed: int = key(
        0,
        "seed of draws, samples, shuffles",
        values=f"from 0 to {MAX_SEED}, the largest that engines take",
        holds=lambda value: 0 <= value <= MAX_SEED,
        verl="data.seed",
        trl="seed",
    )
    output_dir: str = key(
        "outputs/dapo",
        "the run's directory; an existing run continues. Not given: the experiment's, and the keys that make another "
        "run of it, as in `outputs/dapo_tiny-lr_1e-5`",
        values="a directory, new or a run's",
        holds=lambda value: bool(value.strip()),
        verl="trainer.default_local_dir",
        trl="output_dir",
        resume="harmless",
    )
    max_hours: float = at_least(
        0,
        0.0,
        "hours of a start; then the run saves and exits with 85",
        "; 0: none",
        resume="harmless",
    )
    device: str = one_of(
        DEVICES,
        "auto",
        "`auto`: cuda, unless `model.dtype` is float32; `cpu`, `cuda`",
        verl="trainer.device",
        resume="harmless",
    )
    preflight: bool = key(
        True,
        "first check the driver's machine (the fast part of `dapo doctor`) and try the reward functions",
        resume="harmless",
    )
    ray_address: str = key(
        "",
        "`auto`: join a running cluster; `local`: start one; empty: RAY_ADDRESS, else start one",
        resume="harmless",
    )
    nodes_timeout_s: float = at_least(
        0,
        0.0,
        "longest wait for nodes that a Ray cluster lacks",
        "; 0: such a cluster is refused at once",
        resume="harmless",
    )
    only: str = one_of(
        HALVES,
        "both",
        "`rollout` (`--rollout-only`): generate and score, keep the batches; `train` (`--train-only`): train "
        "on `data.batches`; `both`",
    )
    colocate: str = key(
        "none",
        "share GPUs: `time`: engines and actors take turns; `lend`: engines also use the actors' GPUs while "
        "these wait; `none`",
        values="one of none, time, lend (time is what memory and true were, none what false was)",
        holds=lambda value: value in COLOCATIONS,
        verl="actor_rollout_ref.hybrid_engine",
        trl="vllm_mode",
        resume="harmless",
    )


@dataclass(slots=True)
class Config:
    """Holds the whole configuration of a run."""

    model: ModelConfig = section(ModelConfig)
    data: DataConfig = section(DataConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    eval: EvalConfig = section(EvalConfig, resume="harmless")
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    reward: RewardConfig = section(RewardConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    actor: ActorConfig = section(ActorConfig)
    weight_sync: WeightSyncConfig = section(WeightSyncConfig, resume="harmless")
    checkpoint: CheckpointConfig = section(CheckpointConfig, resume="harmless")
    logging: LoggingConfig = section(LoggingConfig, resume="harmless")
    trainer: TrainerConfig = section(TrainerConfig)
