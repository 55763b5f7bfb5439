"""The sections `data`, `rollout`, `eval` and `filter_groups`: what is sampled, and what is kept.

Lengths are in tokens of the model's tokenizer. Defaults are those of the paper's run (arXiv 2503.14476, section 4).
"""

import re
from dataclasses import dataclass
from typing import Any

from dapo.config.algorithm import MAX_SUPPORT
from dapo.config.fields import MISSING, at_least, key, node_labels, one_of, own, positive, section, share
from dapo.config.reward import RewardFunctionConfig

FORMATS = ("auto", "verl", "trl", "gsm8k", "qa", "math")
SET_NAME = re.compile(r"[\w.-]+")  # used in names of metrics


@dataclass(slots=True)
class SourceConfig:
    """Problems that are read and scored alike; metrics are in `source/NAME/`."""

    name: str = key(
        MISSING,
        "its name in metrics: letters, digits, `_.-`",
        values="letters, digits and `_.-`, neither `train` nor `eval`",
        holds=lambda value: SET_NAME.fullmatch(value) is not None,
    )
    files: list[str] = key([], "as `data.train_files`", values="at least one file or hub data set", holds=bool)
    val_files: list[str] = key([], "its held-out set, as `data.val_files`")
    weight: float = positive(1.0, "its share of the draws")
    format: str = one_of(FORMATS, "auto", "as `data.format`")
    system_prompt: str = key("", "as `data.system_prompt`, which it replaces")
    max_response_length: int = at_least(0, 0, "as `data.max_response_length`; 0: the same")
    functions: list[RewardFunctionConfig] = key([], "reward functions in place of `reward.functions`")


ON_BUDGET = ("fail", "train_partial")
ADMISSION = ("draw_order", "completion")
CURRICULA = ("uniform", "retire", "weighted")
EVERY_TOKEN = "; 1.0 keeps every token"
TOP_K = "-1 or 0, which both keep every token, or at least 1"  # what vLLM accepts
ROLLOUT = "actor_rollout_ref.rollout"  # of verl's names
# Arguments of transformers' `apply_chat_template` that no template reads, or that dapo sets itself.
OWN_TEMPLATE_KWARGS = (
    *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)
MAX_SAMPLES = 1000  # per held-out problem: with more, the number of subsets overflows a float


def _are_files(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(file, str) for file in value)


def _are_sets(value: Any) -> bool:
    """Whether the value is a list of files, a mapping from names to a file or a list of files, or None."""
    if not isinstance(value, dict):
        return value is None or _are_files(value)
    named = all(isinstance(name, str) and SET_NAME.fullmatch(name) for name in value)
    return named and all(isinstance(one, str) or (one and _are_files(one)) for one in value.values())


@dataclass(slots=True)
class DataConfig:
    """Prompts come from .parquet, .json or .jsonl files, `pkg://PACKAGE/FILE`, or a hub data set."""

    train_files: list[str] = key(
        [MISSING],
        "files of training prompts, or a hub name",
        values="at least one file or hub data set, as in data.train_files=[a.parquet], or data.sources=[...]",
        verl="data.train_files",
        trl="dataset_name, GRPOTrainer.train_dataset",
    )
    sources: list[SourceConfig] = key(
        [],
        "several sources instead: data.sources=[{name: sums, files: [a.parquet], weight: 2}, {name: words, "
        "files: [b.jsonl]}]",
    )
    format: str = one_of(
        FORMATS,
        "auto",
        "columns of the files; `auto`: told by their names",
    )
    system_prompt: str = key(
        "",
        "first message of each prompt, also in evaluation; empty: that of the rows",
    )
    chat_template_kwargs: dict[str, Any] = key(
        {},
        "arguments of the chat template: data.chat_template_kwargs.enable_thinking=false",
        values=f"a mapping without what dapo itself gives ({', '.join(OWN_TEMPLATE_KWARGS)})",
        holds=lambda given: not {*given} & {*OWN_TEMPLATE_KWARGS},
        verl="data.apply_chat_template_kwargs",
        trl="chat_template_kwargs",
    )
    val_files: Any = key(
        None,  # a mapping cannot replace a list
        "files of held-out prompts, or sets: data.val_files={aime: a.parquet, gsm8k: [b.jsonl]}; empty: no evaluation",
        values="a list of files, or a mapping from names (letters, digits, `_.-`, neither train nor eval) to a file or "
        "a list of files",
        holds=_are_sets,
        verl="data.val_files",
        trl="GRPOTrainer.eval_dataset",
        resume="harmless",
    )
    batches: str = key("", "folder `batches/` of a run, for `trainer.only=train`")
    train_batch_size: int = at_least(
        1,
        512,
        "prompts (groups) of one update",
        verl="data.train_batch_size",
        trl="generation_batch_size / num_generations",
    )
    gen_batch_size: int = at_least(
        1,
        1536,
        "draws of a generation batch; bounds the draws in flight",
        verl="data.gen_batch_size",
        resume="harmless",
    )
    max_prompt_length: int = at_least(
        1, 2048, "tokens; longer prompts are dropped", verl="data.max_prompt_length", trl="max_prompt_length"
    )
    max_response_length: int = at_least(
        1, 20480, "tokens; longer responses are truncated", verl="data.max_response_length", trl="max_completion_length"
    )
    max_contradictory: float = key(
        0.1,
        "largest share of prompts left out because their ground truths disagree",
        values="a share of the distinct prompts, 0 to 1",
        holds=lambda value: 0 <= value <= 1,
        resume="harmless",
    )
    max_too_long: float = key(
        0.1,
        "largest share of prompts left out because they are longer than `data.max_prompt_length`",
        values="a share of the distinct prompts, 0 to 1",
        holds=lambda value: 0 <= value <= 1,
        resume="harmless",
    )
    shuffle: bool = key(True, "another seeded order in each epoch", verl="data.shuffle", trl="shuffle_dataset")
    curriculum: str = one_of(
        CURRICULA,
        "uniform",
        "`retire`: skip solved prompts; `weighted`: prefer pass rates near 1/2; `uniform`: neither",
    )
    retire_after: int = at_least(1, 2, "`retire`: visits in a row with all responses right")
    retire_steps: int = at_least(1, 50, "`retire`: steps until such a prompt comes back")
    min_weight: float = share(0.1, "`weighted`: least chance of a visit")


@dataclass(slots=True)
class SamplingConfig:
    """Training and evaluation sample alike: a new sampling parameter is one more field here. The values are those of
    evaluation, and `RolloutConfig` replaces what training wants otherwise."""

    n: int = key(
        32,
        "samples per held-out prompt, at least its number of rows",
        values=f"1 to {MAX_SAMPLES}",
        holds=lambda value: 1 <= value <= MAX_SAMPLES,
        verl=f"{ROLLOUT}.val_kwargs.n",
        trl="num_generations_eval",
    )
    temperature: float = at_least(0, 1.0, "temperature", "; 0: greedy", verl=f"{ROLLOUT}.val_kwargs.temperature")
    top_p: float = share(0.7, "nucleus sampling", EVERY_TOKEN, verl=f"{ROLLOUT}.val_kwargs.top_p")
    top_k: int = key(
        -1,
        "most likely tokens sampled from; -1: all",
        values=TOP_K,
        holds=lambda value: value >= -1,
        verl=f"{ROLLOUT}.val_kwargs.top_k",
    )
    min_p: float = key(
        0.0,
        "least probability, relative to the most likely token; 0: off",
        values="at least 0 and below 1; 0 keeps every token",
        holds=lambda value: 0 <= value < 1,
        trl="min_p",
    )


@dataclass(slots=True)
class RolloutFunctionConfig:
    """Answers in several turns: `async def rollout(prompt, generate, sampling)` (dapo/turns/README.md)."""

    path: str = key(
        "",
        "a Python file, a dotted module, or a ready one: `one_turn`, `retry`, `tool_use`; empty: one turn",
        verl=f"{ROLLOUT}.multi_turn",
        trl="rollout_func",
    )
    name: str = key("rollout", "the function in it")
    kwargs: dict[str, Any] = key({}, "given to it by keyword")
    num_workers: int = at_least(1, 2, "Ray actors that run it", resume="harmless")
    timeout_s: float = positive(
        60.0,
        "longest time from one turn to the next",
        resume="harmless",
    )
    retries: int = at_least(0, 1, "new attempts after a failure; then the response is unscorable", resume="harmless")


@dataclass(slots=True)
class OutsideConfig:
    """Engines outside of the Ray cluster (`dapo serve`), which reach the driver over TLS."""

    listen: str = key(
        "",
        "HOST:PORT of the driver's machine where they connect; needs the files below and `weight_sync.store`",
        values="empty, or HOST:PORT",
        holds=lambda value: not value or re.fullmatch(r"[^\s/]+:[1-9]\d{0,4}", value) is not None,
        resume="harmless",
    )
    certificate_file: str = key("", "PEM file of the driver's TLS certificate", resume="harmless")
    key_file: str = key("", "PEM file of its key", resume="harmless")
    token_file: str = key("", "file with a secret of at least 16 characters that engines must know", resume="harmless")
    engines: int = at_least(1, 1, "most of them at a time", resume="harmless")


@dataclass(slots=True)
class RolloutConfig(SamplingConfig):
    """vLLM engines sample the responses."""

    n: int = at_least(
        2,
        16,
        "responses per prompt, at least 2",
        ": the advantage compares the responses of a group",
        verl=f"{ROLLOUT}.n, rollout.n",
        trl="num_generations",
    )
    temperature: float = positive(
        1.0, "temperature, also of the log-probabilities", verl=f"{ROLLOUT}.temperature", trl="temperature"
    )
    top_p: float = share(
        1.0,
        "nucleus sampling; below 1 it needs `rollout.top_k`",
        EVERY_TOKEN,
        verl=f"{ROLLOUT}.top_p",
        trl="top_p",
    )
    top_k: int = key(
        -1,
        f"most likely tokens sampled from, at most {MAX_SUPPORT}; -1: all",
        values=TOP_K,
        holds=lambda value: value >= -1,
        verl=f"{ROLLOUT}.top_k",
        trl="top_k",
    )
    replay_experts: bool = key(
        False,
        "actors use the experts that the engines chose (router replay, R3)",
        verl=f"{ROLLOUT}.enable_rollout_routing_replay",
    )
    num_engines: int = at_least(
        1,
        1,
        "vLLM engines, each with `tensor_parallel_size` GPUs",
        verl="rollout.nnodes, rollout.n_gpus_per_node",
        resume="harmless",
    )
    engines_per_gpu: int = at_least(
        1,
        1,
        "engines that share a GPU (`trainer.colocate=time`), for models of at most 3B, whose engines wait for their "
        "host process",
        resume="harmless",
    )
    cpu_threads: int = at_least(1, 1, "threads of an engine without GPU", resume="harmless")
    start_timeout_s: float = positive(900.0, "longest start of an engine", resume="harmless")
    timeout_s: float = positive(3600.0, "longest wait for a group", resume="harmless")
    stall_timeout_s: float = positive(
        120.0,
        "longest time without a token; then the engine is replaced",
        resume="harmless",
    )
    max_restarts: int = at_least(0, 5, "restarts of an engine within an hour; then it is given up", resume="harmless")
    min_engines: int = at_least(1, 1, "with fewer engines the run saves and ends", resume="harmless")
    max_engines: int = at_least(
        0,
        0,
        "engines that the run grows to as nodes join the cluster",
        "; 0: `num_engines`",
        resume="harmless",
    )
    leave_s: float = positive(
        120.0,
        "most seconds that an engine which leaves (`dapo scale`, a node that goes) has to finish responses",
        resume="harmless",
    )
    node_labels: dict[str, str] = node_labels("an engine")
    outside: OutsideConfig = section(OutsideConfig)
    function: RolloutFunctionConfig = section(RolloutFunctionConfig)
    vllm: dict[str, Any] = key(
        {},
        "engine arguments under vLLM's names: `rollout.vllm.max_num_seqs=256`",
        verl=f"{ROLLOUT}.engine_kwargs.vllm",
        resume="harmless",
    )


@dataclass(slots=True)
class EvalConfig(SamplingConfig):
    """Held-out prompts are answered `n` times each, beside training."""

    every: int = at_least(
        0,
        5,
        "steps between evaluations",
        "; 0: none on the way",
        verl="trainer.test_freq, rollout.test_freq",
        trl="eval_steps",
    )
    before_train: bool = key(True, "evaluate the base model", verl="trainer.val_before_train", trl="eval_on_start")
    after_train: bool = key(True, "evaluate after the last step")


@dataclass(slots=True)
class FilterGroupsConfig:
    """Dynamic sampling (section 3.2 of the paper): train on groups with right and wrong responses."""

    enable: bool = key(
        True,
        "train on mixed groups only (Eq. 11)",
        verl="algorithm.filter_groups.enable",
    )
    function: str = own(
        "your function for what a group is worth, FILE.py:FUNCTION",
    )
    max_num_gen_batches: int = at_least(
        0,
        10,
        "generation batches that one update may draw",
        "; 0: no bound, while some groups are usable",
        verl="algorithm.filter_groups.max_num_gen_batches",
        resume="harmless",
    )
    on_budget: str = one_of(
        ON_BUDGET,
        "fail",
        "then: `fail` stops the run, `train_partial` trains on what there is",
        resume="harmless",
    )
    min_scored: int = key(2, "scorable responses that a group needs")
    admission: str = one_of(
        ADMISSION,
        "draw_order",
        "`draw_order`: first groups by draw; `completion`: first to finish, which favours short responses",
    )
    max_staleness: int = at_least(
        0,
        0,
        "updates that a token may be old; 0: on-policy; above: engines continue during the update (see "
        "`algorithm.rollout_correction`)",
        verl="async_training.staleness_threshold",
        trl="max_staleness",
    )
