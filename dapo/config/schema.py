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
    """A checkpoint holds what a run needs to go on, and the model in Hugging Face's format."""

    every: int = at_least(
        0, 5, "steps between checkpoints", "; 0: only the last", verl="trainer.save_freq", trl="save_steps"
    )
    every_s: float = at_least(0, 0.0, "seconds after which the next step is saved, whatever its number", "; 0: none")
    resume: str = key(
        "auto",
        "`auto` continues the run in the output directory, `never` refuses a directory that holds one; a checkpoint's "
        "directory: where to start from, of another run into a new output directory, or of this one to go back to; the "
        "same command continues",
        values="auto, never, or a path whose last part is step_ and at least six digits",
        holds=lambda value: value in RESUME or re.search(r"(^|/)step_\d{6,}/?$", value) is not None,
        verl="trainer.resume_mode, trainer.resume_from_path",
        trl="resume_from_checkpoint",
    )
    accept_changes: list[str] = key(
        [],
        "keys, or whole sections, that may differ from the run that is continued although they alter what it means "
        "(model, data, sampling, objective); without it such a change is refused",
    )
    keep: int = at_least(
        0, 3, "newest checkpoints kept", "; 0: all", verl="trainer.max_actor_ckpt_to_keep", trl="save_total_limit"
    )
    hf_export: bool = key(True, "also write the model in Hugging Face's format, under `hf/`")
    push_to_hub: str = key(
        "",
        "repository on the Hugging Face hub to which `hf/` is pushed, beside training and at the end of the run; a new "
        "one is private; the token is that of HF_TOKEN or `hf auth login`; a push that fails, or takes longer than "
        "`checkpoint.timeout_s`, is a warning",
        values="empty, or OWNER/NAME",
        holds=lambda value: not value or re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", value) is not None,
        trl="push_to_hub, hub_model_id",
    )
    async_save: bool = key(
        False,
        "write a checkpoint while training goes on, from a copy in the memory of the ranks' hosts, as much again as "
        "parameters, optimizer and export (`python -m dapo.plan` says how much, and whether it fits); without it the "
        "next update waits",
        verl="actor_rollout_ref.actor.checkpoint.async_save",
    )
    timeout_s: float = positive(1800.0, "longest checkpoint in seconds")
    max_failed_saves: int = at_least(
        0, 3, "saves in a row that may fail, for lack of space for example, before the run stops"
    )
    journal: bool = key(
        True, "between checkpoints, write finished groups under `journal/`, so that a crash does not lose them"
    )
    batches: int = at_least(
        0,
        20,
        "last steps whose groups are kept under `batches/`, for `python -m dapo.replay`, which needs a checkpoint "
        "before them too",
        "; 0: none",
    )


@dataclass(slots=True)
class LoggingConfig:
    """Metrics always go to `metrics.jsonl` in the output directory, groups to `samples.sqlite`; here is what comes on
    top."""

    tensorboard: bool = key(
        True, "scalars and sample texts under `tensorboard/`", verl="trainer.logger", trl="report_to"
    )
    samples: int = at_least(
        0, 2, "responses shown per step there", verl="trainer.log_val_generations", trl="num_completions_to_print"
    )
    wandb: dict[str, Any] = key(
        {},
        "Weights & Biases, where its package is installed: arguments of `wandb.init` "
        "(`logging.wandb.project=dapo`, `logging.wandb.mode=offline`); empty: off",
        verl="trainer.logger, trainer.project_name, trainer.experiment_name",
        trl="report_to",
    )
    mlflow: dict[str, Any] = key(
        {},
        "MLflow, where its package is installed: `tracking_uri` (or MLFLOW_TRACKING_URI), and optionally `experiment` "
        "(dapo) and `run_name`; empty: off",
        verl="trainer.logger",
        trl="report_to",
    )
    prometheus: bool = key(
        False,
        "the newest numbers as gauges `ray_dapo_*` on Ray's Prometheus endpoints, for `launch/grafana.json`; needs "
        "`ray[default]`",
    )
    watchdog_s: float = positive(
        60.0,
        "seconds after which, without a terminal, a line says what goes on in a step, after which a wait is told, and "
        "after as many again",
    )
    sample_fraction: float = key(
        1.0,
        "share of the groups whose texts are kept in `samples.sqlite`; the rest of every group is",
        values="from 0 to 1",
        holds=lambda value: 0 <= value <= 1,
    )
    max_text_bytes: int = at_least(
        0, 32_768, "longest text kept there; of a longer one the beginning and the end", "; 0: no texts"
    )
    max_store_bytes: int = at_least(
        0,
        50_000_000_000,
        "size of `samples.sqlite` above which the texts of the oldest groups and answers make room for new ones; all "
        "figures of every step stay",
        "; 0: no limit",
    )
    worker_logs: bool = key(
        False, "also print what the remote workers print; without it their output is in Ray's log directory only"
    )


@dataclass(slots=True)
class TrainerConfig:
    """The driver runs the algorithm on one machine of a Ray cluster."""

    total_steps: int = at_least(
        1, 1000, "updates of the run", verl="trainer.total_training_steps", trl="max_steps", resume="harmless"
    )
    seed: int = key(
        0,
        "seed of draws, samples and shuffles",
        values=f"from 0 to {MAX_SEED}, the largest that engines take",
        holds=lambda value: 0 <= value <= MAX_SEED,
        verl="data.seed",
        trl="seed",
    )
    output_dir: str = key(
        "outputs/dapo",
        "the run's directory: configuration, metrics, checkpoints; an existing one continues its run. Not given: the "
        "experiment's, and after it the keys that make another run of it, as in `outputs/dapo_tiny-lr_1e-5`; keys that "
        "a resumed run may change, and those of `checkpoint.accept_changes`, do not count",
        values="a directory, new or a run's",
        holds=lambda value: bool(value.strip()),
        verl="trainer.default_local_dir",
        trl="output_dir",
        resume="harmless",
    )
    max_hours: float = at_least(
        0,
        0.0,
        "wall-clock limit of one start in hours: before it the run saves and ends with exit code 85",
        "; 0: none",
        resume="harmless",
    )
    device: str = one_of(
        DEVICES,
        "auto",
        "where actors and engines compute; `auto`: cuda, unless `model.dtype` is float32, which no GPU takes",
        verl="trainer.device",
        resume="harmless",
    )
    preflight: bool = key(
        True,
        "look at the driver's machine before workers start, the cheap part of `python -m dapo.doctor`: limits, disks, "
        "shared memory; a fault ends the run",
        resume="harmless",
    )
    ray_address: str = key(
        "",
        "`auto` joins a running cluster, `local` starts one, empty takes RAY_ADDRESS or else starts one",
        resume="harmless",
    )
    nodes_timeout_s: float = at_least(
        0,
        0.0,
        "longest wait in seconds for nodes that are still to join a Ray cluster which is too small for the run; its "
        "autoscaler is told what is missing",
        "; 0: such a cluster is refused at once",
        resume="harmless",
    )
    only: str = one_of(
        HALVES,
        "both",
        "the half that runs: `rollout` (the flag `--rollout-only`) generates and scores one batch per step with the "
        "model as it is and keeps them all under `batches/`, `train` (`--train-only`) trains on those of "
        "`data.batches`; neither evaluates",
    )
    colocate: str = key(
        "none",
        "whether engines and actors share GPUs and take turns: `time` gives all of each GPU to whose turn it is: an "
        "engine owns the GPUs of `rollout.vllm.tensor_parallel_size` ranks, and sleeps while they train; `lend` has "
        "`rollout.num_engines` with GPUs of their own, and as many more as the ranks' GPUs hold, which wake while the "
        "actors wait for a batch, where that gains more seconds than it was measured to cost",
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
