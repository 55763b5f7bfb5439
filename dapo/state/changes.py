"""Compares the configuration of a resumed run with the one it was trained with: which changes alter its meaning. A key
that is in neither list counts as one that alters the meaning; a test requires an entry for every key."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from dapo.config.fields import ITEM, keys
from dapo.config.names import hint, known_keys
from dapo.config.schema import Config
from dapo.report.redact import redacted

# The most specific entry counts: a key, or a section with all its keys.
MEANING = (  # what is trained, on which data, towards which objective
    "model",
    "data",
    "rollout.n",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.function",
    "filter_groups",
    "reward",
    "reward.judge.engine.path",
    "algorithm",
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
    "actor.shuffle",
    "trainer.seed",
    "trainer.only",
)
HARMLESS = (  # speed, duration, frequency, resources; and the learning-rate schedule
    "model.trust_remote_code",
    "model.attn_implementation",
    "model.gradient_checkpointing",
    "data.val_files",
    "data.gen_batch_size",
    "data.max_contradictory",  # the prompts themselves are compared by their fingerprint
    "rollout.num_engines",
    "rollout.cpu_threads",
    "rollout.start_timeout_s",
    "rollout.timeout_s",
    "rollout.stall_timeout_s",
    "rollout.max_restarts",
    "rollout.min_engines",
    "rollout.node_labels",
    "rollout.function.num_workers",
    "rollout.function.timeout_s",
    "rollout.function.retries",
    "rollout.vllm",
    "eval",
    "filter_groups.max_num_gen_batches",
    "filter_groups.on_budget",
    "reward.num_workers",
    "reward.limits",
    "reward.concurrency",
    "reward.remote",
    "reward.judge.url",
    "reward.judge.engine",
    "reward.judge.key_variable",
    "reward.judge.prompt_cost",
    "reward.judge.completion_cost",
    "reward.timeout_s",
    "reward.model.num_workers",
    "reward.model.device",
    "reward.model.num_gpus",
    "reward.model.max_tokens",
    "reward.model.trust_remote_code",
    "reward.model.cpu_threads",
    "reward.model.node_labels",
    "reward.model.timeout_s",
    "algorithm.rollout_correction.max_mean_stale_logprob_diff",
    "actor.num_workers",
    "actor.max_tokens_per_gpu",
    "actor.ulysses_sequence_parallel_size",
    "actor.fsdp_size",
    "actor.reshard_after_forward",
    "actor.offload",
    "actor.cpu_threads",
    "actor.start_timeout_s",
    "actor.timeout_s",
    "actor.max_restarts",
    "actor.node_labels",
    "actor.optim",
    "weight_sync",
    "checkpoint",
    "logging",
    "trainer.total_steps",
    "trainer.max_hours",
    "trainer.output_dir",
    "trainer.device",
    "trainer.nodes_timeout_s",
    "trainer.preflight",
    "trainer.ray_address",
    "trainer.colocate",
)
COURSE = ("actor.optim",)  # harmless ones that change the weights all the same
JUDGE = "reward.judge"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    key: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"`{self.key}` is {self.there!r} there and {self.here!r} here"


def alters_meaning(key: str) -> bool:
    meaning, harmless = (
        max((len(entry) for entry in table if covers(entry, key)), default=0) for table in (MEANING, HARMLESS)
    )
    return meaning >= harmless


def alters_course(key: str) -> bool:
    """Whether another value leads to other weights, also if the run means the same."""
    return alters_meaning(key) or any(covers(entry, key) for entry in COURSE)


def covers(entry: str, key: str) -> bool:
    """Whether `entry` is the key itself or a section around it."""
    return f"{key}.".startswith(f"{entry}.")


def changes(there: dict[str, Any], here: dict[str, Any]) -> list[Change]:
    """Returns what differs, in the order of the configuration. there, here: as `dataclasses.asdict` of a `Config`, or
    parts of it. Not compared: other keys, secrets, which a recorded configuration lacks, and the judge's keys if
    neither uses a judge, because a default may have changed."""
    before, after = values(redacted(there)), values(redacted(here))
    asks = any(_asks_a_judge(each) for each in (before, after))
    compared = [key for key in before if asks or not covers(JUDGE, key)]
    return [Change(key=key, there=before[key], here=after[key]) for key in compared if before[key] != after[key]]


def _asks_a_judge(config: dict[str, Any]) -> bool:
    own = [source.get("functions") or [] for source in config["data.sources"] if isinstance(source, dict)]
    functions = [function for some in (config["reward.functions"], *own) for function in some]
    return any(isinstance(function, dict) and function.get("path") == "judge" for function in functions)


def values(config: dict[str, Any]) -> dict[str, Any]:
    return {one.name: value_of(config, one.name, one.default) for one in keys(Config) if ITEM not in one.name}


def check_accepted(accepted: Sequence[str]) -> None:
    for name in accepted:
        if name not in known_keys():
            raise ValueError(f"`checkpoint.accept_changes` names `{name}`, which is no key; {hint(name)}")


def is_accepted(key: str, accepted: Iterable[str]) -> bool:
    return any(covers(entry, key) for entry in accepted)


def value_of(config: Any, key: str, default: Any = None) -> Any:
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return [_plain(item) for item in default] if isinstance(default, list) else default
        config = config[part]
    return config


def _plain(item: Any) -> Any:
    return asdict(item) if is_dataclass(item) and not isinstance(item, type) else item
