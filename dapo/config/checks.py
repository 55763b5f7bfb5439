"""Checks of the composed configuration across fields, before any worker starts."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path

from dapo.config import fields
from dapo.config.algorithm import (
    CLIP,
    MAX_SUPPORT,
    POLICY_LOSSES,
    AlgorithmConfig,
    PolicyLoss,
    RolloutCorrectionConfig,
    corrects,
)
from dapo.config.names import ENGINE
from dapo.config.rules.engine import (
    arguments,
    batches,
    decoding,
    quantized_training,
    random_weights,
    replayed_experts,
    stages,
    starts,
)
from dapo.config.rules.model import actor, served
from dapo.config.rules.placement import outside, placement
from dapo.config.rules.reward import code, judge, reward_model, waits
from dapo.config.schema import Config

# Engine arguments that dapo sets itself from other keys.
OWN_ENGINE_ARGS = {
    "model": "model.path",
    "tokenizer": "model.path, whose tokenizer makes prompts of texts and texts of responses",
    "skip_tokenizer_init": "nothing: the tokenizer makes texts of responses",
    "seed": "trainer.seed: every request has a seed of its own, which is made of it",
    "logprobs_mode": "nothing: the objective needs processed_logprobs",
    "max_logprobs": "rollout.top_k and algorithm.score_centering, which need so many",
    "return_sampling_mask": "rollout.top_k: what could be sampled comes with the log-probabilities",
    "worker_extension_cls": "nothing: the weight sync needs its own",
    "weight_transfer_config": "nothing: the weight sync needs its own",
    "enable_return_routed_experts": "rollout.replay_experts",
    "data_parallel_size": "rollout.num_engines",
    "nnodes": "rollout.vllm.tensor_parallel_size: an engine's GPUs are of one node, and it would wait for others",
    "prefill_context_parallel_size": "rollout.vllm.tensor_parallel_size",
}

WHOLE_ENGINE_ARGS = (
    *("tensor_parallel_size", "pipeline_parallel_size"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
)

TRAIN = "train"
RESERVED = (TRAIN, "eval")  # names of splits in the sample store (`dapo.report.store.schema`)
CENTERED = ("clip", "cispo", "reinforce")  # losses that `algorithm.score_centering` goes with
MAX_GSPO_CLIP = 0.05  # a hundred times the published bounds; a larger value was meant for single tokens
MAX_GEOMETRIC = 1.1  # a mean difference of 0.1 nats per token; a larger value was meant for single tokens


def validate(cfg: Config, *, trains: bool = True) -> None:
    """Raises ValueError with one line per problem. trains: whether there are actor ranks, not only engines."""
    checks: list[Callable[[Config], Iterator[str]]] = [
        fields.problems,
        _engine_numbers,
        *([_sources, _sampling, _batch_shapes, _halves, _warmup] if trains else []),
        _lengths,
        _greedy,
        *([_objective, _policy_loss, _correction, _kept_cache, quantized_training, replayed_experts] if trains else []),
        _engine_args,
        _push,
        starts,
        *([] if trains and cfg.trainer.only != "rollout" else [random_weights]),
        decoding,
        *([actor, placement, outside] if trains else [served]),
        waits,
        code,
        reward_model,
        judge,
    ]
    if any(_engine_numbers(cfg)):
        checks = checks[:2]  # the other checks compute with these numbers
    problems = [problem for check in checks for problem in check(cfg)]
    if problems:
        raise ValueError("\n".join(problems))


def doubts(cfg: Config) -> Iterator[str]:
    """Yields warnings about settings that are valid but probably wrong."""
    low, high = cfg.algorithm.clip_ratio_low, cfg.algorithm.clip_ratio_high
    if low > high:
        yield (
            f"`algorithm.clip_ratio_low` ({low}) is above `algorithm.clip_ratio_high` ({high}): tokens are let down "
            "further than up, the contrary of DAPO's clip-higher (0.2 and 0.28); exchange them if that is not meant"
        )

    staleness, algorithm = cfg.filter_groups.max_staleness, cfg.algorithm
    if staleness and not corrects(algorithm):
        yield (
            f"`filter_groups.max_staleness` ({staleness}) trains on tokens of older policies, and nothing corrects for "
            "it; set `algorithm.rollout_correction.mode` (truncate or mask) or `algorithm.score_centering`, or take a "
            "loss whose own ratio does (`algorithm.rollout_correction.use_rollout_logprobs=true`)"
        )


def _sources(cfg: Config) -> Iterator[str]:
    data = cfg.data
    if bool(data.train_files) == bool(data.sources):
        have = f"{data.train_files}), and so has `data.sources`" if data.sources else "[]), and `data.sources` is empty"
        yield (
            f"`data.train_files` ({have}; give at least one file or hub data set, as in data.train_files=[a.parquet], "
            "or data.sources=[{name: sums, files: [a.parquet]}] with data.train_files=[]"
        )
    named = list(data.val_files) if isinstance(data.val_files, dict) else []
    names = [("data.val_files", name) for name in named]
    names += [(f"data.sources[{index}].name", source.name) for index, source in enumerate(data.sources)]
    for key, name in names:
        if name in RESERVED:  # would be mixed up in the sample store
            what = "the training prompts" if name == TRAIN else "a held-out set without a name"
            yield f"`{key}` ({name}) is the name that `samples.sqlite` has for {what}; take another, such as my_{name}"
    for name in (source.name for source in data.sources if source.val_files and source.name in named):
        yield f"`data.val_files` has a set `{name}`, and so has `data.sources` with its `val_files`; rename one"
    if data.val_files and not isinstance(data.val_files, dict) and any(source.val_files for source in data.sources):
        yield (
            f"`data.val_files` ({data.val_files}) is a set without a name, next to `val_files` of `data.sources`; name "
            "it, as in data.val_files={all: a.parquet}"
        )
    for index, source in enumerate(data.sources):
        key = f"data.sources[{index}]"
        if source.name in [one.name for one in data.sources[:index]]:
            yield f"`{key}.name` ({source.name}) stands twice; metrics need a name for each"
        if source.max_response_length > data.max_response_length:
            yield (
                f"`{key}.max_response_length` ({source.max_response_length}) must be at most "
                f"`data.max_response_length` ({data.max_response_length}), which engines are made for; raise that one"
            )
        overlong = cfg.reward.overlong_buffer
        if overlong.enable and 0 < source.max_response_length <= overlong.len:
            yield (
                f"`{key}.max_response_length` ({source.max_response_length}) must be larger than "
                f"`reward.overlong_buffer.len` ({overlong.len}); lower the buffer, raise the cap, or switch it off "
                "(`reward.overlong_buffer.enable=false`)"
            )


def _push(cfg: Config) -> Iterator[str]:
    if cfg.checkpoint.push_to_hub and not cfg.checkpoint.hf_export:
        yield (
            f"`checkpoint.push_to_hub` ({cfg.checkpoint.push_to_hub}) pushes what `checkpoint.hf_export` (false) does "
            "not write; set that to true, or drop the repository"
        )


def _sampling(cfg: Config) -> Iterator[str]:
    """Truncated sampling needs the tokens that could be sampled at each position: the engine returns the most likely
    ones, so that their number must have a bound."""
    rollout = cfg.rollout
    for name, whole, cuts in ("top_p", 1.0, rollout.top_p < 1), ("min_p", 0.0, rollout.min_p > 0):
        if cuts and rollout.top_k < 1:
            yield (
                f"`rollout.{name}` ({getattr(rollout, name)}) needs `rollout.top_k` ({rollout.top_k}) in training, the "
                "most tokens of a position that the engines return to the actors; give rollout.top_k=50, say, or "
                f"sample from all tokens (rollout.{name}={whole})"
            )
    if rollout.top_k > MAX_SUPPORT:
        yield (
            f"`rollout.top_k` ({rollout.top_k}) must be at most {MAX_SUPPORT} in training, where engines return all "
            "tokens that could be sampled; lower it, or take -1 for all tokens"
        )


def _batch_shapes(cfg: Config) -> Iterator[str]:
    batch, mini = cfg.data.train_batch_size, cfg.actor.ppo_mini_batch_size
    if mini > 0 and batch > 0 and batch % mini:
        near = next(size for size in range(min(mini, batch), 0, -1) if batch % size == 0)
        yield (
            f"`actor.ppo_mini_batch_size` ({mini}) must divide `data.train_batch_size` ({batch}); "
            f"the next divisor below is {near}"
        )
    scored, n = cfg.filter_groups.min_scored, cfg.rollout.n
    if n >= 2 and not 2 <= scored <= n:
        yield (
            f"`filter_groups.min_scored` ({scored}) must be at least 2, for a mixed group has a right and a wrong "
            f"response, and at most `rollout.n` ({n})"
        )
    budget = cfg.filter_groups.max_num_gen_batches * cfg.data.gen_batch_size
    if 0 < budget < batch:
        yield (
            f"`filter_groups.max_num_gen_batches` ({cfg.filter_groups.max_num_gen_batches}) x `data.gen_batch_size` "
            f"({cfg.data.gen_batch_size}) allows {budget} draws, below `data.train_batch_size` ({batch}); raise one"
        )


def _halves(cfg: Config) -> Iterator[str]:
    folder = cfg.data.batches
    if (cfg.trainer.only == "train") != bool(folder):
        yield (
            f"`trainer.only` is {cfg.trainer.only}, and `data.batches` ({folder or 'empty'}) is for train, which needs "
            "it: give both, as --train-only=RUN/batches does, or neither"
        )
    elif folder and not any(Path(folder).expanduser().glob("step_*.parquet")):
        yield (
            f"`data.batches` ({folder}) holds no batch; give the folder batches/ of a run with `checkpoint.batches` or "
            "--rollout-only"
        )


def _warmup(cfg: Config) -> Iterator[str]:
    """Refuses a warm-up without effect: transformers' `constant` schedule has none, unlike verl's."""
    optim = cfg.actor.optim
    if optim.lr_scheduler == "constant" and optim.lr_warmup_steps > 0:
        yield (
            f"`actor.optim.lr_scheduler` (constant) has no warm-up, and `actor.optim.lr_warmup_steps` is "
            f"{optim.lr_warmup_steps}; take constant_with_warmup, or set the steps to 0"
        )


def _lengths(cfg: Config) -> Iterator[str]:
    prompt, response = cfg.data.max_prompt_length, cfg.data.max_response_length
    overlong = cfg.reward.overlong_buffer
    if overlong.enable and not 0 < overlong.len < response:
        yield (
            f"`reward.overlong_buffer.len` ({overlong.len}) must be at least 1 and smaller than "
            f"`data.max_response_length` ({response}); lower the buffer, raise the cap, or switch it off "
            "(`reward.overlong_buffer.enable=false`)"
        )
    window = cfg.rollout.vllm.get("max_model_len")
    if window is not None and window < prompt + response:
        yield (
            f"`rollout.vllm.max_model_len` ({window}) must be at least `data.max_prompt_length` + "
            f"`data.max_response_length` ({prompt + response}); leave it out to get just that"
        )


def _greedy(cfg: Config) -> Iterator[str]:
    """Refuses several samples per problem at temperature 0: they would all be the same."""
    held_out = cfg.data.val_files or any(source.val_files for source in cfg.data.sources)
    if held_out and cfg.eval.temperature == 0 and cfg.eval.n > 1:
        yield (
            f"`eval.n` ({cfg.eval.n}) must be 1 with `eval.temperature` (0), where all answers to a problem are the "
            "same; set eval.n=1, or a temperature above 0"
        )


def _engine_numbers(cfg: Config) -> Iterator[str]:
    """Checks the vLLM arguments that dapo itself computes with."""
    for name in filter(cfg.rollout.vllm.__contains__, WHOLE_ENGINE_ARGS):
        value = cfg.rollout.vllm[name]
        if value is None and not name.endswith("parallel_size"):  # vLLM's default
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"`rollout.vllm.{name}` ({value}) must be a whole number, at least 1"
    share = cfg.rollout.vllm.get("gpu_memory_utilization", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        yield f"`rollout.vllm.gpu_memory_utilization` ({share}) must be a share, above 0 and at most 1"


def _engine_args(cfg: Config) -> Iterator[str]:
    # `decoding` checks the arguments for speculation.
    yield from arguments(ENGINE, cfg.rollout.vllm, OWN_ENGINE_ARGS)
    overrides = cfg.rollout.vllm.get("hf_overrides", {})
    if not isinstance(overrides, dict):
        yield f"`{ENGINE}.hf_overrides` ({overrides}) must be a mapping, such as {{rope_theta: 1000000}}"
    elif "head_dtype" in overrides:
        yield (
            f"`{ENGINE}.hf_overrides.head_dtype` ({overrides['head_dtype']}) is the engines' alone; remove it and use "
            "`model.head_dtype`, which the actors follow too"
        )
    cpu = cfg.trainer.device == "auto" and cfg.model.dtype == "float32"  # float32: never on GPUs
    device = "cpu" if cpu else cfg.trainer.device
    yield from batches(cfg, device)
    yield from stages(cfg, device)


def _objective(cfg: Config) -> Iterator[str]:
    algorithm, kl = cfg.algorithm, cfg.algorithm.kl
    if algorithm.policy_loss == "gspo" and max(algorithm.clip_ratio_low, algorithm.clip_ratio_high) > MAX_GSPO_CLIP:
        yield (
            f"`algorithm.clip_ratio_low` ({algorithm.clip_ratio_low}) and `algorithm.clip_ratio_high` "
            f"({algorithm.clip_ratio_high}) bound a single token's ratio, but `algorithm.policy_loss` is gspo, whose "
            "ratio is a mean over the response; the published values are 0.0003 and 0.0004"
        )
    if algorithm.score_centering:
        yield from _score_centering(cfg)
    if kl.loss_coeff and kl.reward_coeff:
        yield (
            f"`algorithm.kl.loss_coeff` ({kl.loss_coeff}) and `algorithm.kl.reward_coeff` ({kl.reward_coeff}) would "
            "count the same distance twice; set one of them to 0"
        )
    if algorithm.advantage.function == "reinforce_plus_plus" and algorithm.advantage.whiten:
        yield (
            "`algorithm.advantage.whiten` (true) would scale once more what `algorithm.advantage.function` "
            "(reinforce_plus_plus) has normalized over the batch; set it to false"
        )
    if cfg.filter_groups.function and not cfg.filter_groups.enable:
        yield (
            f"`filter_groups.function` ({cfg.filter_groups.function}) is not asked where `filter_groups.enable` is "
            "false; set that to true, or leave the function out"
        )


def _score_centering(cfg: Config) -> Iterator[str]:
    """It centers the gradient of losses whose weight of a token is that of `rollout_correction` alone."""
    algorithm, own = cfg.algorithm, f"`algorithm.score_centering` ({cfg.algorithm.score_centering})"
    loss, correction = algorithm.policy_loss, algorithm.rollout_correction
    if loss not in CENTERED:
        yield f"{own} does not fit `algorithm.policy_loss` ({loss}); take one of {', '.join(CENTERED)}, or set it to 0"
    if correction.use_rollout_logprobs and loss in ("clip", "cispo"):
        yield (
            f"{own} would correct twice with `algorithm.rollout_correction.use_rollout_logprobs` (true), whose ratio "
            "has no drift; set one of them to its default"
        )
    if correction.mode != "none" and correction.level != "token":
        yield (
            f"{own} needs weights of single tokens, and `algorithm.rollout_correction.level` is {correction.level}; "
            "take token, or set it to 0"
        )
    for name, value, usual in (
        ("entropy_top_share", algorithm.entropy_top_share, 1.0),
        ("rollout_correction.off_policy_mask_threshold", correction.off_policy_mask_threshold, 0.0),
    ):
        if value != usual:
            yield f"{own} centers all tokens, and `algorithm.{name}` ({value}) leaves some out; set one to its default"


def _policy_loss(cfg: Config) -> Iterator[str]:
    """Refuses parameters of a loss that is not the one that trains, and what it does not go with."""
    algorithm, correction = cfg.algorithm, cfg.algorithm.rollout_correction
    loss = POLICY_LOSSES.get(algorithm.policy_loss, PolicyLoss(""))
    given = {key.name: attrgetter(key.name)(algorithm) for key in fields.keys(AlgorithmConfig)}
    usual = {key.name: key.default for key in fields.keys(AlgorithmConfig)}
    of_losses = dict.fromkeys([*CLIP, *(name for each in POLICY_LOSSES.values() for name in each.keys)])
    for name in [name for name in of_losses if name not in loss.keys and given[name] != usual[name]]:
        users = ", ".join(known for known, each in POLICY_LOSSES.items() if name in each.keys)
        yield (
            f"`algorithm.{name}` ({given[name]}) is a parameter of {users}, and `algorithm.policy_loss` is "
            f"{algorithm.policy_loss}; take one of these, or leave the key at {usual[name]}"
        )
    if loss.of_engines and not correction.use_rollout_logprobs:
        yield (
            f"`algorithm.policy_loss` ({algorithm.policy_loss}) compares the policy with the engines, and "
            "`algorithm.rollout_correction.use_rollout_logprobs` (false) computes other log-probabilities for that; "
            "set it to true"
        )
    if algorithm.clip_cov.lower >= algorithm.clip_cov.upper:
        yield (
            f"`algorithm.clip_cov.lower` ({algorithm.clip_cov.lower}) must be below `algorithm.clip_cov.upper` "
            f"({algorithm.clip_cov.upper}); 1 and 5 are the published values"
        )


def _correction(cfg: Config) -> Iterator[str]:
    correction = cfg.algorithm.rollout_correction
    if correction.use_rollout_logprobs and correction.mode != "none" and cfg.algorithm.policy_loss != "reinforce":
        yield (
            f"`algorithm.rollout_correction.mode` ({correction.mode}) corrects log-probabilities of the actors, and "
            "`algorithm.rollout_correction.use_rollout_logprobs` takes the engine's instead; the ratio to the engine "
            "would count twice: set mode to none or use_rollout_logprobs to false, or `algorithm.policy_loss` to "
            "reinforce, which has no ratio"
        )
    usual = RolloutCorrectionConfig()
    if correction.mode == "icepop":
        for name in ("level", "lower", "upper"):
            if (value := getattr(correction, name)) != getattr(usual, name):
                yield (
                    f"`algorithm.rollout_correction.{name}` ({value}) is not asked by `mode` icepop, which masks per "
                    f"token by the published bounds 0.5 and 5; take mode=mask, or leave it at {getattr(usual, name)}"
                )
    if correction.mode == "mask" and not correction.lower < 1 < correction.upper:
        yield (
            f"`algorithm.rollout_correction.lower` ({correction.lower}) and `upper` ({correction.upper}) must enclose "
            "1, the weight of a token on which both policies agree"
        )
    if correction.mode in ("truncate", "mask") and correction.level == "geometric" and correction.upper > MAX_GEOMETRIC:
        yield (
            f"`algorithm.rollout_correction.upper` ({correction.upper}) bounds a single token's ratio, but `level` is "
            f"geometric, whose ratio is a mean over the response; give 1.001, say, and at most {MAX_GEOMETRIC} (with "
            "mask, and 0.999 as `lower`)"
        )


def _kept_cache(cfg: Config) -> Iterator[str]:
    """Refuses to keep what no request has at a sync, and to train on tokens of no single policy as if they were."""
    if not cfg.weight_sync.keep_kv_cache:
        return
    own, staleness = "`weight_sync.keep_kv_cache` (true)", cfg.filter_groups.max_staleness
    if cfg.trainer.colocate == "time" or not staleness:
        yield (
            f"{own} is for requests that run during a sync; with `filter_groups.max_staleness` ({staleness}) and "
            f"`trainer.colocate` ({cfg.trainer.colocate}) none do: take 1 or more, and none or lend, or set it to false"
        )
    if not corrects(cfg.algorithm):
        yield (
            f"{own} makes tokens of the new weights and old keys, and nothing corrects for it; set "
            "`algorithm.rollout_correction.mode` (truncate, say), or it to false"
        )
