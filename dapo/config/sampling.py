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
    """A source holds problems that are read and scored alike; metrics stand under `source/NAME/`."""

    name: str = key(
        MISSING,
        "its name in metrics, and its `data_source` where the rows have none",
        values="letters, digits and `_.-`, neither `train` nor `eval`",
        holds=lambda value: SET_NAME.fullmatch(value) is not None,
    )
    files: list[str] = key([], "as `data.train_files`", values="at least one file or hub data set", holds=bool)
    val_files: list[str] = key([], "its held-out set: as one of that name in `data.val_files`, read and scored as here")
    weight: float = positive(1.0, "its share of the draws, next to the other weights")
    format: str = one_of(FORMATS, "auto", "as `data.format`")
    system_prompt: str = key("", "first message of each prompt, in place of the rows' own; empty: as the rows have it")
    max_response_length: int = at_least(
        0, 0, "tokens, at most `data.max_response_length`; a longer response is truncated; 0: the same"
    )
    functions: list[RewardFunctionConfig] = key(
        [], "reward functions in place of `reward.functions`, by their names in metrics as NAME:FUNCTION; empty: those"
    )


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
        "files of training prompts, all of one source; empty where `data.sources` has several",
        values="at least one file or hub data set, as in data.train_files=[a.parquet], or data.sources=[...]",
        verl="data.train_files",
        trl="dataset_name, GRPOTrainer.train_dataset",
    )
    sources: list[SourceConfig] = key(
        [],
        "several sources in place of `data.train_files`: data.sources=[{name: sums, files: [a.parquet], weight: 2}, "
        "{name: words, files: [b.jsonl]}]",
    )
    format: str = one_of(
        FORMATS,
        "auto",
        "columns of the files: `verl` (data_source, prompt, reward_model, as DAPO-Math-17k), `trl` (prompt as text or "
        "messages; answer, solution or ground_truth), `gsm8k` (question; answer, after ####), `qa` (question; the "
        "same as `trl`), `math` (problem; answer, or the last box of solution); `auto` tells by their names",
    )
    chat_template_kwargs: dict[str, Any] = key(
        {},
        "what the chat template reads beside messages, in training, evaluation and all turns of a rollout function: "
        "data.chat_template_kwargs.enable_thinking=false",
        values=f"a mapping without what dapo itself gives ({', '.join(OWN_TEMPLATE_KWARGS)})",
        holds=lambda given: not {*given} & {*OWN_TEMPLATE_KWARGS},
        verl="data.apply_chat_template_kwargs",
        trl="chat_template_kwargs",
    )
    val_files: Any = key(
        None,  # a mapping cannot replace a list
        "files of held-out prompts, one set, or several sets with names of their own: "
        "data.val_files={aime: a.parquet, gsm8k: [b.jsonl]}; empty: no evaluation",
        values="a list of files, or a mapping from names (letters, digits, `_.-`, neither train nor eval) to a file or "
        "a list of files",
        holds=_are_sets,
        verl="data.val_files",
        trl="GRPOTrainer.eval_dataset",
        resume="harmless",
    )
    batches: str = key("", "folder `batches/` of a run, which `trainer.only=train` trains on; else empty")
    train_batch_size: int = at_least(
        1,
        512,
        "prompts (groups) that one update trains on",
        verl="data.train_batch_size",
        trl="generation_batch_size / num_generations",
    )
    gen_batch_size: int = at_least(
        1,
        1536,
        "draws that one generation batch holds: bounds the draws in flight, and is the unit of "
        "`filter_groups.max_num_gen_batches`",
        verl="data.gen_batch_size",
        resume="harmless",
    )
    max_prompt_length: int = at_least(
        1, 2048, "tokens; longer prompts are dropped", verl="data.max_prompt_length", trl="max_prompt_length"
    )
    max_response_length: int = at_least(
        1, 20480, "tokens; a longer response is truncated", verl="data.max_response_length", trl="max_completion_length"
    )
    max_contradictory: float = key(
        0.1,
        "prompts that may be left out because the files give them ground truths that disagree; more are an error",
        values="a share of the distinct prompts, 0 to 1",
        holds=lambda value: 0 <= value <= 1,
        resume="harmless",
    )
    shuffle: bool = key(
        True, "draw the prompts of each epoch in another seeded order", verl="data.shuffle", trl="shuffle_dataset"
    )
    curriculum: str = one_of(
        CURRICULA,
        "uniform",
        "which visits are skipped by how a prompt went before: none; `retire`: those to prompts that are solved; "
        "`weighted`: the more, the further the pass rate is from 1/2",
    )
    retire_after: int = at_least(1, 2, "with `retire`: visits in a row with all responses right after which it is")
    retire_steps: int = at_least(1, 50, "with `retire`: steps after which such a prompt comes back for a visit")
    min_weight: float = share(0.1, "with `weighted`: least chance that a visit stands, whatever the pass rate")


@dataclass(slots=True)
class SamplingConfig:
    """Training and evaluation sample alike: a new sampling parameter is one more field here. The values are those of
    evaluation, and `RolloutConfig` replaces what training wants otherwise."""

    n: int = key(
        32,
        "samples per held-out prompt, or as many as it has rows in the files where these are more",
        values=f"1 to {MAX_SAMPLES}",
        holds=lambda value: 1 <= value <= MAX_SAMPLES,
        verl=f"{ROLLOUT}.val_kwargs.n",
        trl="num_generations_eval",
    )
    temperature: float = at_least(
        0, 1.0, "temperature of sampling", "; 0: greedy", verl=f"{ROLLOUT}.val_kwargs.temperature"
    )
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
        "least probability of a token that is sampled, as a part of the most likely one's",
        values="at least 0 and below 1; 0 keeps every token",
        holds=lambda value: 0 <= value < 1,
        trl="min_p",
    )


@dataclass(slots=True)
class RolloutFunctionConfig:
    """A rollout function answers a prompt in several turns: `async def rollout(prompt, generate, sampling)`
    (dapo/turns/README.md). Lengths, overlong rules and the loss count the tokens that the policy sampled."""

    path: str = key(
        "",
        "a Python file, a dotted module, or a ready one: `one_turn`, `retry`, `tool_use`; empty: one turn, without it",
        verl=f"{ROLLOUT}.multi_turn",
        trl="rollout_func",
    )
    name: str = key("rollout", "the function's name in that file or module")
    kwargs: dict[str, Any] = key({}, "given to it by keyword, besides prompt, generate and sampling")
    num_workers: int = at_least(1, 2, "Ray actors that run it", resume="harmless")
    timeout_s: float = positive(
        60.0,
        "longest time in seconds that it takes from one turn to the next, waits of its programs for others apart",
        resume="harmless",
    )
    retries: int = at_least(
        0, 1, "new attempts at a response whose function failed; then it is unscorable", resume="harmless"
    )


@dataclass(slots=True)
class RolloutConfig(SamplingConfig):
    """vLLM engines sample the responses."""

    n: int = at_least(
        2,
        16,
        "responses per prompt",
        ": the advantage compares the responses of a group",
        verl=f"{ROLLOUT}.n, rollout.n",
        trl="num_generations",
    )
    temperature: float = positive(
        1.0, "temperature of sampling, also of the log-probabilities", verl=f"{ROLLOUT}.temperature", trl="temperature"
    )
    top_p: float = share(
        1.0,
        "nucleus sampling; below 1.0 `rollout.top_k` must be set, so that engines return the tokens that could be "
        "sampled and the actors compute the same distribution",
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
        "engines return the experts that each token passed through, and the actors take these in place of their own "
        "choice (router replay, R3); for mixtures of experts",
        verl=f"{ROLLOUT}.enable_rollout_routing_replay",
    )
    num_engines: int = at_least(
        1,
        1,
        "vLLM engines, each with `tensor_parallel_size` GPUs of its own",
        verl="rollout.nnodes, rollout.n_gpus_per_node",
        resume="harmless",
    )
    cpu_threads: int = at_least(1, 1, "OpenMP threads of one engine on a machine without GPU", resume="harmless")
    start_timeout_s: float = positive(
        900.0, "longest start of an engine in seconds, loading included", resume="harmless"
    )
    timeout_s: float = positive(3600.0, "longest wait for one group in seconds", resume="harmless")
    stall_timeout_s: float = positive(
        120.0,
        "seconds without an answer, or without a token while requests run, after which an engine is replaced; longest "
        "transfer of one weight bucket",
        resume="harmless",
    )
    max_restarts: int = at_least(
        0, 5, "restarts of one engine within an hour; one that needs more is given up", resume="harmless"
    )
    min_engines: int = at_least(
        1, 1, "engines to go on with when others are given up; with fewer the run saves and ends", resume="harmless"
    )
    node_labels: dict[str, str] = node_labels("an engine")
    function: RolloutFunctionConfig = section(RolloutFunctionConfig)
    vllm: dict[str, Any] = key(
        {},
        "engine arguments under vLLM's own names (`rollout.vllm.max_num_seqs=256`), compared with the types in the "
        "installed vLLM's source and passed on as they are",
        verl=f"{ROLLOUT}.engine_kwargs.vllm",
        resume="harmless",
    )


@dataclass(slots=True)
class EvalConfig(SamplingConfig):
    """Held-out prompts are answered `n` times each, at the side of training: while engines are free and while the
    actors update."""

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
    """Dynamic sampling (section 3.2 of the paper) trains only on groups that have a right and a wrong response."""

    enable: bool = key(
        True,
        "keep only groups with 0 < correct < n (Eq. 11); off: every scored group is trained on",
        verl="algorithm.filter_groups.enable",
    )
    function: str = own(
        "a function of your own that says what a group is worth, in place of Eq. 11 (dapo/algorithm/own/README.md)",
    )
    max_num_gen_batches: int = at_least(
        0,
        10,
        "budget: generation batches that one update may draw",
        "; 0: no bound, unless 20 of them in a row, 1,000 groups at least, hold no usable group",
        verl="algorithm.filter_groups.max_num_gen_batches",
        resume="harmless",
    )
    on_budget: str = one_of(
        ON_BUDGET,
        "fail",
        "when the budget is spent, `fail` stops the run, `train_partial` trains on the usable groups that are there",
        resume="harmless",
    )
    min_scored: int = key(2, "scorable responses that a group needs, 2 to `rollout.n`")
    admission: str = one_of(
        ADMISSION,
        "draw_order",
        "`draw_order` trains on the first usable groups in the order of the draws; `completion` on those that finish "
        "first, which favours short responses",
    )
    max_staleness: int = at_least(
        0,
        0,
        "updates that a token may be old when it is trained on; 0: every response is sampled from the policy that is "
        "updated, and the engines rest during the update; above, they go on (with `trainer.colocate=time` after it, "
        "where they stood), and `algorithm.rollout_correction` corrects for it",
        verl="async_training.staleness_threshold",
        trl="max_staleness",
    )
