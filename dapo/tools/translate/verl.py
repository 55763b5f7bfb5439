"""Rules for fields of verl whose values are converted. Fields without a rule: `verl=` at dapo's fields, and
`dapo.config.elsewhere`."""

import math
import re
from pathlib import Path
from typing import Any

from dapo.config.algorithm import LOSS_AGG_MODES
from dapo.config.paths import resolve_path
from dapo.tools.translate.outcome import OFF, Outcome, Rules, Run, instead, refused, same, translated
from dapo.tools.translate.shell import is_known

ENTRIES = (  # modules and files that train, as shell patterns
    *("verl.*.main_ppo", "verl.*_main", "*main_ppo.py", "*.main_dapo"),
    *("recipe.*.main_*", "recipe.*_main*", "recipe.*main_ppo", "recipe.*.main", "rep_exp.main_*"),
)
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
CORRECTION, OPTIM = "algorithm.rollout_correction", f"{ACTOR}.optim"

DEFAULTS: dict[str, Any] = {  # of verl/trainer/config, where dapo's differ or a rule reads them
    "data.train_batch_size": 1024,
    "data.gen_batch_size": None,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_penalty": "kl",
    "algorithm.filter_groups.enable": False,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.policy_loss.kl_cov_ratio": 0.0002,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.shuffle": False,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{OPTIM}.lr_warmup_steps": -1,
    f"{OPTIM}.lr_warmup_steps_ratio": 0.0,
    f"{OPTIM}.lr_scheduler_type": "constant",
    f"{OPTIM}.weight_decay": 0.01,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
    f"{MODEL}.lora_alpha": 16,
    "actor_rollout_ref.hybrid_engine": True,
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": False,
    "custom_reward_function.path": None,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.total_epochs": 30,
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.default_local_dir": None,
}
CONFIG_NAMES = re.compile(
    r"(fully_async_|one_step_off_|transfer_queue_|dapo_(transfer_queue_)?)?(ppo_)?(megatron_)?trainer"
)
ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm.advantage.function": "group"},
    "grpo_vectorized": {"algorithm.advantage.function": "group"},
    "rloo": {"algorithm.advantage.function": "rloo"},
    "rloo_vectorized": {"algorithm.advantage.function": "rloo"},
    "reinforce_plus_plus": {"algorithm.advantage.function": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {
        "algorithm.advantage.function": "group",
        "algorithm.advantage.normalize_by_std": False,
        "algorithm.advantage.whiten": True,
    },
}
LOSSES = {
    **{"vanilla": "clip", "gspo": "gspo", "sapo": "sapo", "clip_cov": "clip_cov", "kl_cov": "kl_cov"},
    **{"geo_mean": "gmpo", "cispo": "cispo", "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl"},
}
KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _files(run: Run, value: Any, key: str = "data.train_files") -> Outcome:
    if value is None:
        return instead("no files")
    return same(key, value) if isinstance(value, list) else translated(f"a list, `{key}`", {key: [value]})


def _batch(run: Run, value: Any) -> Outcome:
    if value:
        return same("data.train_batch_size", value)
    mini = run.get(f"{ACTOR}.ppo_mini_batch_size")
    steps = run.get("async_training.require_batches") or 1
    every = run.get("async_training.trigger_parameter_sync_step") or 1
    said = (
        f"prompts of an update: mini-batch x require_batches x trigger_parameter_sync_step ({mini} x {steps} x {every})"
    )
    return translated(said, {"data.train_batch_size": mini * steps * every})


def _draws(run: Run, value: Any) -> Outcome:
    size = _batch(run, run.get("data.train_batch_size")).sets["data.train_batch_size"]
    if value and value >= size:
        return same("data.gen_batch_size", value)
    return translated("the size of an update, `data.train_batch_size`", {"data.gen_batch_size": size})


def _prompt_key(run: Run, value: Any) -> Outcome:
    if value in ("prompt", None):
        return instead("`data.format` says which columns the files have")
    return refused(f"the column is `prompt`, or one that a `data.format` reads; rename {value}")


def _limit(run: Run, value: Any) -> Outcome:
    return instead("all rows are used, here too") if value in OFF else refused("write a file of that many rows")


def _estimator(run: Run, value: Any) -> Outcome:
    if value not in ESTIMATORS:
        return refused(f"there is no advantage {value}; there are {', '.join(ESTIMATORS)}, and functions of your own")
    return translated(", ".join(f"`{key}`={one}" for key, one in ESTIMATORS[value].items()), ESTIMATORS[value])


def _std(run: Run, value: Any) -> Outcome:
    if "plus_plus" in str(run.get("algorithm.adv_estimator")):
        return instead("`algorithm.adv_estimator` does not read it, here and in verl")
    return same("algorithm.advantage.normalize_by_std", value)


def _kl_reward(run: Run, value: Any) -> Outcome:
    if not run.get("algorithm.use_kl_in_reward"):
        return instead("off: `algorithm.kl.reward_coeff` is 0")
    if run.get("algorithm.kl_ctrl.type") == "adaptive":
        return refused("`algorithm.kl.reward_coeff` stays as it is given; take kl_ctrl.type=fixed")
    coeff = run.get("algorithm.kl_ctrl.kl_coef")
    return translated("switched on by its factor", {"algorithm.kl.reward_coeff": coeff})


def _kl_loss(run: Run, value: Any) -> Outcome:
    if not run.get(f"{ACTOR}.use_kl_loss"):
        return instead("off: `algorithm.kl.loss_coeff` is 0")
    coeff = run.get(f"{ACTOR}.kl_loss_coef")
    return translated("switched on by its factor", {"algorithm.kl.loss_coeff": coeff})


def _kl_kind(run: Run, value: Any) -> Outcome:
    if not run.get(f"{ACTOR}.use_kl_loss") and not run.get("algorithm.use_kl_in_reward"):
        return instead("there is no KL penalty")
    if value not in KL:
        return refused(f"the estimators are k1, k2 and k3, not {value}")
    return translated(f"`algorithm.kl.estimator`={KL[value]}", {"algorithm.kl.estimator": KL[value]})


def _kl_kind_in_reward(run: Run, value: Any) -> Outcome:
    return (
        _kl_kind(run, value) if run.get("algorithm.use_kl_in_reward") else instead("there is no KL penalty in rewards")
    )


def _clip(run: Run, value: Any) -> Outcome:
    return instead("verl too reads clip_ratio_low and clip_ratio_high, which have defaults of their own (0.2)")


def _low(run: Run, value: Any) -> Outcome:
    key = "algorithm.clip_ratio_low"
    return same(key, value) if value <= 1 else translated("1: no lower bound", {key: 1.0})


def _loss(run: Run, value: Any) -> Outcome:
    if value not in LOSSES:
        return refused(f"there is no loss {value}; there are {', '.join(LOSSES.values())}, and functions of your own")
    sets: dict[str, Any] = {"algorithm.policy_loss": LOSSES[value]}
    if value == "geo_mean":
        sets |= {"algorithm.gmpo.low": run.get(f"{ACTOR}.clip_ratio_low")}
        sets |= {"algorithm.gmpo.high": run.get(f"{ACTOR}.clip_ratio_high")}
    return translated(", ".join(f"`{key}`={one}" for key, one in sets.items()), sets)


def _agg(run: Run, value: Any) -> Outcome:
    if value not in LOSS_AGG_MODES:
        return refused(f"the weights of tokens are {', '.join(LOSS_AGG_MODES)}, not {value}")
    return same("algorithm.loss_agg_mode", value)


def _tokens(run: Run, value: Any) -> Outcome:
    """verl's bound counts only with `use_dynamic_bsz`; both bound a rank's share of a sequence."""
    key, parts = "actor.max_tokens_per_gpu", run.get(f"{ACTOR}.ulysses_sequence_parallel_size") or 1
    longest = run.get("data.max_prompt_length") + run.get("data.max_response_length")
    least = math.ceil(longest / parts)
    if run.get(f"{ACTOR}.use_dynamic_bsz") and value and value >= least:
        return same(key, value)
    micro = run.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu") or 1
    if run.get(f"{ACTOR}.use_dynamic_bsz") or not isinstance(micro, int):
        micro = 1
    return translated(f"{micro} of the longest sequences ({longest} tokens)", {key: micro * least})


def _steps_known(run: Run) -> int | None:
    steps = run.get("trainer.total_training_steps")
    if steps:
        return int(steps)
    if samples := run.get("rollout.total_rollout_steps"):
        return max(1, int(samples) // _batch(run, run.get("data.train_batch_size")).sets["data.train_batch_size"])
    rows = rows_of(run.get("data.train_files"))
    return rows and max(1, rows // (run.get("data.train_batch_size") or 1) * int(run.get("trainer.total_epochs")))


def rows_of(files: Any) -> int | None:
    """Returns the rows of local files, or None where they are not all here."""
    from pyarrow import ArrowException, parquet

    total = 0
    for file in files if isinstance(files, list) else [files]:
        try:
            path = Path(resolve_path(str(file)))
            if path.suffix == ".parquet":
                total += parquet.read_metadata(path).num_rows
            elif path.suffix == ".jsonl":
                total += sum(1 for line in path.open("rb") if line.strip())
            else:
                return None
        except (OSError, ArrowException):
            return None
    return total


def _epochs(run: Run, value: Any) -> Outcome:
    if run.get("trainer.total_training_steps") or run.get("rollout.total_rollout_steps"):
        return instead("another field gives the steps, which count")
    steps = _steps_known(run)
    if steps is None:
        return instead(
            f"`trainer.total_steps` counts updates and keeps dapo's default: the files are not here; give it {value} "
            f"x their rows / {run.get('data.train_batch_size')}"
        )
    return translated(f"{value} epochs are {steps} updates", {"trainer.total_steps": steps})


def _rollout_steps(run: Run, value: Any) -> Outcome:
    return translated("prompts, by the prompts of an update", {"trainer.total_steps": _steps_known(run)})


def _total(run: Run, value: Any) -> Outcome:
    return same("trainer.total_steps", value) if value not in OFF else instead("the epochs say it")


def _warmup(run: Run, value: Any) -> Outcome:
    key, steps = "actor.optim.lr_warmup_steps", run.get(f"{OPTIM}.lr_warmup_steps")
    if steps is not None and steps >= 0:
        return same(key, steps) if value == steps else instead("lr_warmup_steps counts")
    ratio = run.get(f"{OPTIM}.lr_warmup_steps_ratio") or 0.0
    total = _steps_known(run) if ratio else 0
    if total is None:
        return refused(
            f"`{key}` counts steps, and their number is not known here; give it {ratio} x `trainer.total_steps`"
        )
    return translated(f"{ratio} of {total} steps" if ratio else "none", {key: int(ratio * total)})


def _scheduler(run: Run, value: Any) -> Outcome:
    key, least = "actor.optim.lr_scheduler", run.get(f"{OPTIM}.min_lr_ratio") or 0.0
    if value is None:
        return instead("lr_scheduler_type says it")
    if value == "cosine" and least:
        sets = {key: "cosine_with_min_lr", "actor.optim.lr_scheduler_kwargs": {"min_lr_rate": least}}
        return translated("cosine_with_min_lr, by min_lr_ratio", sets)
    if value == "cosine":
        return same(key, value)
    if value == "constant":
        return translated("constant after the warm-up: constant_with_warmup", {key: "constant_with_warmup"})
    return refused(f"verl's {value} is not known; `{key}` takes transformers' names")


def _gpus(run: Run, value: Any) -> Outcome:
    nodes, each = run.get("trainer.nnodes"), run.get("trainer.n_gpus_per_node")
    if not isinstance(nodes, int) or not isinstance(each, int):
        return refused("the number of GPUs is not known without running it")
    ranks, one = nodes * each, _gpus_of_an_engine(run)
    if not run.get("actor_rollout_ref.hybrid_engine") or "rollout.n_gpus_per_node" in run.given:
        return translated(f"{nodes} x {each} ranks", {"actor.num_workers": ranks})
    sets = {"actor.num_workers": ranks, "rollout.num_engines": max(1, ranks // one)}
    return translated(f"{nodes} x {each} ranks, and as many engines of {one} GPUs as fit on the same", sets)


def _gpus_of_an_engine(run: Run) -> int:
    stages = run.get(f"{ROLLOUT}.pipeline_model_parallel_size") or 1
    tensor = run.get(f"{ROLLOUT}.tensor_model_parallel_size")
    return (tensor if isinstance(tensor, int) else 1) * (stages if isinstance(stages, int) else 1)


def _engines(run: Run, value: Any) -> Outcome:
    nodes, each = run.get("rollout.nnodes") or 1, run.get("rollout.n_gpus_per_node") or 8
    one = _gpus_of_an_engine(run)
    return translated(f"{nodes} x {each} GPUs, {one} an engine", {"rollout.num_engines": max(1, nodes * each // one)})


def _shared(run: Run, value: Any) -> Outcome:
    apart = not value or "rollout.n_gpus_per_node" in run.given
    colocate = "none" if apart else "time"
    said = "engines have GPUs of their own" if apart else "engines and ranks take turns on the same GPUs"
    return translated(said, {"trainer.colocate": colocate})


def _offload(run: Run, value: Any) -> Outcome:
    if run.get(f"{ACTOR}.fsdp_config.offload_policy") is True:
        return translated("host, by offload_policy", {"actor.offload": "host"})
    names = ("optimizer_offload", "param_offload", "grad_offload")
    on = any(run.get(f"{ACTOR}.{part}.{name}") is True for part in ("fsdp_config", "megatron") for name in names)
    if not on:
        return translated("none", {"actor.offload": "none"})
    if "rollout.n_gpus_per_node" in run.given or not run.get("actor_rollout_ref.hybrid_engine"):
        return translated("none: no engine needs the ranks' memory", {"actor.offload": "none"})
    return translated(
        "phase: the optimizer state is in host memory while engines have the GPU", {"actor.offload": "phase"}
    )


def _policy(run: Run, value: Any) -> Outcome:
    return translated("host", {"actor.offload": "host"}) if value else instead("off, here too")


def _greedy(run: Run, value: Any) -> Outcome:
    if value is False:
        sets = {"eval.temperature": 0.0, "eval.n": 1}
        return translated("greedy: one answer at temperature 0", sets)
    return instead("evaluation samples unless `eval.temperature` is 0")


def _eval(name: str) -> Any:
    def rule(run: Run, value: Any) -> Outcome:
        if name in ("temperature", "n") and run.get(f"{ROLLOUT}.val_kwargs.do_sample") is False:
            return instead("do_sample=False makes it greedy, one answer each")
        return same(f"eval.{name}", value)

    return rule


def _correction(run: Run, value: Any) -> Outcome:
    level, reject = run.get(f"{CORRECTION}.rollout_is"), run.get(f"{CORRECTION}.rollout_rs")
    if run.get(f"{CORRECTION}.bypass_mode", "async_training.use_rollout_log_probs"):
        if run.get(f"{CORRECTION}.loss_type") == "reinforce":
            return refused("with bypass_mode: give `algorithm.policy_loss`=reinforce and a correction by hand")
        return instead("the ratio to the engines is the correction (bypass_mode)")
    if level in OFF and reject in OFF:
        return instead("off: `algorithm.rollout_correction.mode` is none")
    if level not in OFF and reject not in OFF:
        return refused("weights and rejection at once: `algorithm.rollout_correction.mode` is truncate or mask")
    if level not in OFF:
        if level not in ("token", "sequence"):
            return refused(f"`algorithm.rollout_correction.level` is token, sequence or geometric, not {level}")
        sets = {f"{CORRECTION}.mode": "truncate", f"{CORRECTION}.level": level}
        upper = run.get(f"{CORRECTION}.rollout_is_threshold")
        return translated("truncated weights", sets | ({f"{CORRECTION}.upper": upper} if upper else {}))
    levels = {"token": "token", "token_k1": "token", "sequence": "sequence", "seq_sum_k1": "sequence"}
    levels |= {"geometric": "geometric", "seq_mean_k1": "geometric"}
    if reject not in levels:
        return refused(f"`mask` compares ratios (k1) of tokens, sequences or their mean, not {reject}")
    low, _, high = str(run.get(f"{CORRECTION}.rollout_rs_threshold")).rpartition("_")
    lower = run.get(f"{CORRECTION}.rollout_rs_threshold_lower") or low
    try:
        bounds = {f"{CORRECTION}.upper": float(high), f"{CORRECTION}.lower": float(lower or 1 / float(high))}
    except ValueError:
        return refused("its bounds are no numbers")
    return translated("mask", {f"{CORRECTION}.mode": "mask", f"{CORRECTION}.level": levels[reject]} | bounds)


def _bypass(run: Run, value: Any) -> Outcome:
    return same(f"{CORRECTION}.use_rollout_logprobs", bool(value))


def _stale(run: Run, value: Any) -> Outcome:
    steps = math.ceil(float(value or 0))
    return translated("a share of an update, in whole updates", {"filter_groups.max_staleness": steps})


def _keep(run: Run, value: Any) -> Outcome:
    return translated("all are kept", {"checkpoint.keep": 0}) if value is None else same("checkpoint.keep", value)


def _every(key: str) -> Any:
    def rule(run: Run, value: Any) -> Outcome:
        if value and value > 0:
            return same(key, value)
        end = {"eval.after_train": False} if key == "eval.every" else {}
        return translated("not after any step" if end else "only the last", {key: 0, **end})

    return rule


def _before(run: Run, value: Any) -> Outcome:
    return same("eval.before_train", value)


def _named(run: Run, name: str) -> str:
    value = run.get(name)
    return str(value) if is_known(value) else "verl"


def _logger(run: Run, value: Any) -> Outcome:
    loggers = value if isinstance(value, list) else [value]
    project, name = (_named(run, f"trainer.{name}") for name in ("project_name", "experiment_name"))
    sets: dict[str, Any] = {"logging.tensorboard": "tensorboard" in loggers}
    if "wandb" in loggers:
        sets["logging.wandb"] = {"project": project, "name": name}
    if "mlflow" in loggers:
        sets["logging.mlflow"] = {"tracking_uri": "${oc.env:MLFLOW_TRACKING_URI,mlruns}", "experiment": project}
        sets["logging.mlflow"] |= {"run_name": name}
    others = [one for one in loggers if one not in ("console", "wandb", "mlflow", "tensorboard")]
    said = "the console and `metrics.jsonl` are always written"
    return translated(said + (f"; there is no {', '.join(map(str, others))}" if others else ""), sets)


def _label(run: Run, value: Any) -> Outcome:
    logger = run.get("trainer.logger")
    if {"wandb", "mlflow"} & {*(logger if isinstance(logger, list) else [logger])}:
        return translated("a name in `logging.wandb` or `logging.mlflow`", {})
    return instead("`trainer.output_dir` names a run")


def _alpha(run: Run, value: Any) -> Outcome:
    if run.get(f"{MODEL}.lora_rank", f"{MODEL}.lora.rank") in OFF:
        return instead("there are no adapters")
    return same("model.lora.alpha", value)


def _folder(run: Run, value: Any) -> Outcome:
    if value:
        return same("trainer.output_dir", value)
    folder = f"outputs/{_named(run, 'trainer.experiment_name')}"
    return translated("by the experiment's name", {"trainer.output_dir": folder})


def _resume(run: Run, value: Any) -> Outcome:
    if value in ("auto", "disable"):
        return translated(
            "never" if value == "disable" else "auto", {"checkpoint.resume": "never" if value == "disable" else "auto"}
        )
    return refused("a run goes on from a checkpoint of dapo's; export verl's to Hugging Face's format as `model.path`")


def _resume_path(run: Run, value: Any) -> Outcome:
    return instead("none") if value in OFF else _resume(run, "resume_path")


def _device(run: Run, value: Any) -> Outcome:
    if value in ("cuda", "cpu"):
        return same("trainer.device", value)
    return refused(f"dapo computes on cuda or cpu, not on {value}")


def _name(run: Run, value: Any) -> Outcome:
    return instead("vLLM always generates" if value != "vllm" else "vLLM generates, here too")


def _replay(run: Run, value: Any) -> Outcome:
    if value == "R3":
        return translated("`rollout.replay_experts`", {"rollout.replay_experts": True})
    return instead("off, here too") if value in (*OFF, "disabled") else refused("of router replay there is R3 alone")


def _agent(run: Run, value: Any) -> Outcome:
    if value in (*OFF, "single_turn_agent"):
        return instead("one turn, here too")
    return refused("`rollout.function.path` names a function for several turns; write it (dapo/turns/README.md)")


def _reward_path(run: Run, value: Any) -> Outcome:
    files = run.get("data.train_files")
    if value in OFF:
        ready = (
            "gsm8k"
            if files and all("gsm8k" in str(one) for one in (files if isinstance(files, list) else [files]))
            else "math"
        )
        said = f"verl chooses by each row's data_source; here `{ready}`, or the function that you name"
        return translated(said, {"reward.functions": [{"path": ready}]})
    entry: dict[str, Any] = {"path": value}
    entry |= (
        {"name": name} if (name := run.get("custom_reward_function.name", "reward.custom_reward_function.name")) else {}
    )
    marks = ("custom_reward_function.reward_kwargs.", "reward.custom_reward_function.reward_kwargs.")
    kwargs = {
        name.removeprefix(mark): one for mark in marks for name, one in run.given.items() if name.startswith(mark)
    }
    entry |= {"kwargs": kwargs} if kwargs else {}
    return translated("the entry of `reward.functions`", {"reward.functions": [entry]})


def _reward_part(run: Run, value: Any) -> Outcome:
    if run.get("custom_reward_function.path", "reward.custom_reward_function.path") in OFF:
        return instead("no function of your own is named")
    return _reward_path(run, run.get("custom_reward_function.path", "reward.custom_reward_function.path"))


def _manager(run: Run, value: Any) -> Outcome:
    if value in ("naive", "dapo", "prime", "rate_limited", None):
        return instead("functions are called for one response at a time; the overlong punishment is a key of its own")
    return refused(f"the manager {value} calls functions in its own way; write a function for one response")


def _reward_model(run: Run, value: Any) -> Outcome:
    on = run.get("reward_model.enable", "reward.reward_model.enable")
    path = run.get("reward_model.model.path", "reward.reward_model.model_path")
    if not on or path in OFF:
        return instead("off, here too")
    return translated("a classifier with one label; one that writes is `reward.judge`", {"reward.model.path": path})


def _part_of_reward_model(key: str) -> Any:
    def rule(run: Run, value: Any) -> Outcome:
        on = run.get("reward_model.enable", "reward.reward_model.enable")
        return same(key, value) if on and value is not None else instead("there is no reward model")

    return rule


def _scorers(run: Run, value: Any) -> Outcome:
    return same("reward.num_workers", max(1, int(value)))


def _penalty(key: str) -> Any:
    def rule(run: Run, value: Any) -> Outcome:
        on = any(
            name.endswith((".overlong_buffer_cfg.enable", ".overlong_buffer.enable")) and one is True
            for name, one in run.given.items()
        )
        return same(f"reward.overlong_buffer.{key}", value) if on else instead("the overlong punishment is off")

    return rule


def _checkpointing(run: Run, value: Any) -> Outcome:
    return translated("full" if value else "none", {"model.gradient_checkpointing": "full" if value else "none"})


def _dtype(run: Run, value: Any) -> Outcome:
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    return same("model.dtype", names.get(value, value))


def _config(run: Run, value: Any) -> Outcome:
    name = str(value).removesuffix(".yaml")
    if CONFIG_NAMES.fullmatch(name):
        return instead("verl's own defaults")
    return refused("there is no such file here; translate the tree that verl prints with `--cfg job --resolve`")


def _flag(run: Run, value: Any) -> Outcome:
    return instead("`--config-name` counts")


def _targets(run: Run, value: Any) -> Outcome:
    key = "model.lora.target_modules"
    return (
        same(key, value) if isinstance(value, list) else translated("a list", {key: str(value).strip("[]").split(",")})
    )


def _samples(run: Run, value: Any) -> Outcome:
    return same("logging.samples", value) if value and value > 0 else translated("none", {"logging.samples": 0})


def _seed(run: Run, value: Any) -> Outcome:
    return instead("`trainer.seed` is 0") if value is None else same("trainer.seed", value)


def _bucket(run: Run, value: Any) -> Outcome:
    return translated("MiB in bytes", {"weight_sync.bucket_bytes": int(value) << 20})


RULES: Rules = {
    "--config-name": _config,
    "--config-*": _flag,
    "data.train_files": _files,
    "data.val_files": lambda run, value: _files(run, value, "data.val_files"),
    "data.train_batch_size": _batch,
    "data.gen_batch_size": _draws,
    "data.prompt_key": _prompt_key,
    "data.*_max_samples": _limit,
    "data.seed": _seed,
    "algorithm.adv_estimator": _estimator,
    "algorithm.norm_adv_by_std_in_grpo": _std,
    "algorithm.use_kl_in_reward": _kl_reward,
    "algorithm.kl_ctrl.*": _kl_reward,
    "algorithm.kl_penalty": _kl_kind_in_reward,
    f"{ACTOR}.use_kl_loss": _kl_loss,
    f"{ACTOR}.kl_loss_coef": _kl_loss,
    f"{ACTOR}.kl_loss_type": _kl_kind,
    f"{ACTOR}.clip_ratio": _clip,
    f"{ACTOR}.clip_ratio_low": _low,
    f"{ACTOR}.policy_loss.loss_mode": _loss,
    f"{ACTOR}.loss_mode": _loss,
    f"{ACTOR}.loss_agg_mode": _agg,
    f"{ACTOR}.ppo_max_token_len_per_gpu": _tokens,
    f"{ACTOR}.*.param_offload": _offload,
    f"{ACTOR}.*.optimizer_offload": _offload,
    f"{ACTOR}.*.grad_offload": _offload,
    f"{ACTOR}.fsdp_config.offload_policy": _policy,
    f"{ACTOR}.fsdp_config.dtype": _dtype,
    f"{ACTOR}.router_replay.mode": _replay,
    f"{ACTOR}.use_rollout_log_probs": _bypass,
    f"{OPTIM}.lr_warmup_steps": _warmup,
    f"{OPTIM}.lr_warmup_steps_ratio": _warmup,
    f"{OPTIM}.lr_scheduler_type": _scheduler,
    f"{OPTIM}.warmup_style": _scheduler,
    f"{OPTIM}.lr_decay_style": _scheduler,
    f"{MODEL}.enable_gradient_checkpointing": _checkpointing,
    f"{MODEL}*.target_modules": _targets,
    f"{ROLLOUT}.dtype": _dtype,
    f"{ROLLOUT}.name": _name,
    f"{ROLLOUT}.val_kwargs.do_sample": _greedy,
    **{f"{ROLLOUT}.val_kwargs.{name}": _eval(name) for name in ("n", "temperature")},
    f"{ROLLOUT}.agent.default_agent_loop": _agent,
    f"{ROLLOUT}*.update_weights_bucket_megabytes": _bucket,
    f"{CORRECTION}.bypass_mode": _bypass,
    f"{CORRECTION}.rollout_is": _correction,
    f"{CORRECTION}.rollout_is_threshold": _correction,
    f"{CORRECTION}.rollout_rs*": _correction,
    "async_training.use_rollout_log_probs": _bypass,
    "async_training.staleness_threshold": _stale,
    "actor_rollout_ref.hybrid_engine": _shared,
    "rollout.nnodes": _engines,
    "rollout.n_gpus_per_node": _engines,
    "rollout.total_rollout_steps": _rollout_steps,
    "rollout.test_freq": _every("eval.every"),
    "custom_reward_function.path": _reward_path,
    "reward.custom_reward_function.path": _reward_path,
    "*custom_reward_function.*": _reward_part,
    "reward*.reward_manager": _manager,
    "reward*.reward_manager.name": _manager,
    "reward_manager.name": _manager,
    "reward_manager.*": lambda run, value: instead("`reward.functions` names functions, not managers"),
    "reward*.overlong_buffer*.len": _penalty("len"),
    "reward*.overlong_buffer*.penalty_factor": _penalty("penalty_factor"),
    "reward_model.enable": _reward_model,
    "reward_model.model.path": _reward_model,
    "reward.reward_model.*": _reward_model,
    "reward_model.max_length": _part_of_reward_model("reward.model.max_length"),
    "reward_model.forward_max_token_len_per_gpu": _part_of_reward_model("reward.model.max_tokens"),
    "reward_model.model.trust_remote_code": _part_of_reward_model("reward.model.trust_remote_code"),
    "reward*.num_workers": _scorers,
    "trainer.nnodes": _gpus,
    "trainer.n_gpus_per_node": _gpus,
    "trainer.total_epochs": _epochs,
    "trainer.total_training_steps": _total,
    "trainer.save_freq": _every("checkpoint.every"),
    "trainer.test_freq": _every("eval.every"),
    "trainer.val_before_train": _before,
    "trainer.max_actor_ckpt_to_keep": _keep,
    "trainer.log_val_generations": _samples,
    "trainer.logger": _logger,
    "trainer.project_name": _label,
    "trainer.experiment_name": _label,
    f"{MODEL}.lora*alpha": _alpha,
    "trainer.default_local_dir": _folder,
    "trainer.resume_mode": _resume,
    "trainer.resume_from_path": _resume_path,
    "trainer.device": _device,
}
