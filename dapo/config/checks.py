"""Checks of the composed configuration across fields, before any worker starts."""

from collections.abc import Callable, Iterator
from pathlib import Path

from dapo.config import fields
from dapo.config.names import ENGINE
from dapo.config.rules.code import code
from dapo.config.rules.decoding import decoding, quantized_training
from dapo.config.rules.engine import arguments, batches, random_weights, stages, starts
from dapo.config.rules.judge import judge
from dapo.config.rules.model import actor, served
from dapo.config.rules.objective import correction, objective
from dapo.config.rules.placement import placement
from dapo.config.rules.reward_model import reward_model
from dapo.config.rules.sources import sources
from dapo.config.schema import Config

# Engine arguments that dapo sets itself from other keys.
OWN_ENGINE_ARGS = {
    "model": "model.path",
    "tokenizer": "model.path, whose tokenizer makes prompts of texts and texts of responses",
    "skip_tokenizer_init": "nothing: the tokenizer makes texts of responses",
    "seed": "trainer.seed: every request has a seed of its own, which is made of it",
    "logprobs_mode": "nothing: the objective needs processed_logprobs",
    "worker_extension_cls": "nothing: the weight sync needs its own",
    "weight_transfer_config": "nothing: the weight sync needs its own",
    "data_parallel_size": "rollout.num_engines",
    "nnodes": "rollout.vllm.tensor_parallel_size: an engine's GPUs are of one node, and it would wait for others",
    "prefill_context_parallel_size": "rollout.vllm.tensor_parallel_size",
}

WHOLE_ENGINE_ARGS = (
    *("tensor_parallel_size", "pipeline_parallel_size"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
)


def validate(cfg: Config, *, trains: bool = True) -> None:
    """Raises ValueError with one line per problem. trains: whether there are actor ranks, not only engines."""
    checks: list[Callable[[Config], Iterator[str]]] = [
        fields.problems,
        _engine_numbers,
        *([sources, _sampling, _batch_shapes, _halves, _warmup] if trains else []),
        _lengths,
        _greedy,
        *([objective, correction, quantized_training] if trains else []),
        _engine_args,
        starts,
        *([] if trains and cfg.trainer.only != "rollout" else [random_weights]),
        decoding,
        *([actor, placement] if trains else [served]),
        _reward_waits,
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


def _sampling(cfg: Config) -> Iterator[str]:
    """Refuses truncated sampling: the actors compute the whole distribution; engines would report other
    probabilities."""
    if cfg.rollout.top_p < 1:
        yield f"`rollout.top_p` ({cfg.rollout.top_p}) must be 1.0 in training (`eval.top_p` may be lower)"
    if cfg.rollout.top_k > 0:
        yield f"`rollout.top_k` ({cfg.rollout.top_k}) must be -1, all tokens, in training (`eval.top_k` may cut)"


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
    elif folder and not any(Path(folder).expanduser().glob("step_*/groups.parquet")):
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
    cpu = cfg.trainer.device == "auto" and cfg.model.dtype == "float32"  # float32 never runs on GPUs (`dapo.derived`)
    device = "cpu" if cpu else cfg.trainer.device
    yield from batches(cfg, device)
    yield from stages(cfg, device)


def _reward_waits(cfg: Config) -> Iterator[str]:
    limits = cfg.reward.limits
    if 2 * limits.cpu_s > limits.wall_s:
        yield (
            f"`reward.limits.wall_s` ({limits.wall_s:g}) must be at least twice `reward.limits.cpu_s` "
            f"({limits.cpu_s:g}), or a response that computes without end never reaches its CPU limit; raise the one "
            "or lower the other"
        )
    if cfg.reward.timeout_s <= cfg.reward.remote.timeout_s:
        yield (
            f"`reward.timeout_s` ({cfg.reward.timeout_s:g}) must be longer than `reward.remote.timeout_s` "
            f"({cfg.reward.remote.timeout_s:g}), or a worker passes for lost while it waits for others; raise the one "
            "or lower the other"
        )
    if cfg.reward.timeout_s <= 2 * limits.wall_s:
        yield (
            f"`reward.timeout_s` ({cfg.reward.timeout_s:g}) must be more than twice `reward.limits.wall_s` "
            f"({limits.wall_s:g}), or a worker passes for lost while responses take their time; raise the one or lower "
            "the other"
        )
