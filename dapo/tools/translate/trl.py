"""Rules for fields of TRL whose values are converted. Fields without a rule: `trl=` at dapo's fields, and
`dapo.config.elsewhere`."""

import json
import math
from collections.abc import Sequence
from typing import Any

from dapo.config.elsewhere import TRL, said_of
from dapo.tools.translate.outcome import OFF, Outcome, Rules, Run, instead, refused, same, translated
from dapo.tools.translate.script import OF_TRL
from dapo.tools.translate.verl import rows_of

ENTRIES = ("grpo", "trl.scripts.grpo", "*g[rs]po*.py")

DEFAULTS: dict[str, Any] = {  # of trl/trainer/grpo_config.py and transformers, where dapo's differ or a rule reads them
    "num_processes": 1,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "num_iterations": 1,
    "max_completion_length": 512,
    "learning_rate": 1e-6,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "lr_scheduler_type": "linear",
    "epsilon": 0.2,
    "epsilon_high": None,
    "beta": 0.0,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_tensor_parallel_size": 1,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "save_steps": 500,
    "eval_strategy": "no",
    "seed": 42,
    "run_name": None,
    "project": "huggingface",
}
LOSSES = {
    "dapo": ("clip", "token-mean"),
    "bnpo": ("clip", "token-mean"),
    "grpo": ("clip", "seq-mean-token-mean"),
    "dr_grpo": ("clip", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
}
LEVELS = {"token": "token", "sequence": "sequence"}
SMALLEST = 1e-9  # a bound below which no weight falls


def options(words: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a command line: --name value, --name=value, --name, name=value."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif "=" in word and word.partition("=")[0].isidentifier():
            first, _, value = word.partition("=")
            found[first], name = [value], ""
        elif name:
            found[name].append(word)
    return {name: _value(values) for name, values in found.items()}


def _value(values: list[str]) -> Any:
    if not values:
        return True
    read = [_scalar(value) for value in values]
    return read[0] if len(read) == 1 else read


def _scalar(text: str) -> Any:
    for kind in (int, float, json.loads):
        try:
            return kind(text)  # type: ignore[operator]
        except ValueError:
            continue
    return {"True": True, "False": False, "None": None}.get(text, text)


def _per_step(run: Run) -> int:
    """Returns the responses of one optimizer step."""
    parts = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    return math.prod(int(run.get(name)) for name in parts)


def _per_generation(run: Run) -> int:
    """Returns the responses of one generation batch."""
    if size := run.get("generation_batch_size"):
        return int(size)
    steps = run.get("steps_per_generation") or run.get("gradient_accumulation_steps")
    return int(run.get("per_device_train_batch_size")) * int(run.get("num_processes")) * int(steps)


def _optimizer_steps(run: Run) -> int:
    """Returns the optimizer steps of one update, and so of a step of dapo's."""
    return max(1, _per_generation(run) // _per_step(run)) * int(run.get("num_iterations"))


def _batches(run: Run, value: Any) -> Outcome:
    n, one, all_ = int(run.get("num_generations")), _per_step(run), _per_generation(run)
    if one % n or all_ % n:
        return refused(
            f"{one} responses of an optimizer step are no whole groups of {n}, which dapo trains on "
            f"(processes: {run.get('num_processes')}; num_processes=N gives another number)"
        )
    sets = {"data.train_batch_size": all_ // n, "actor.ppo_mini_batch_size": min(one, all_) // n}
    sets["data.gen_batch_size"] = all_ // n
    return translated(
        f"{all_} responses of a generation are {all_ // n} prompts, {one} of an optimizer step {one // n}; processes: "
        f"{run.get('num_processes')} (num_processes=N)",
        sets,
    )


def _ranks(run: Run, value: Any) -> Outcome:
    ranks, one = int(run.get("num_processes")), int(run.get("vllm_tensor_parallel_size"))
    if run.get("use_vllm") and run.get("vllm_mode") == "server":
        return translated(f"{ranks} ranks; an engine has GPUs of its own", {"actor.num_workers": ranks})
    sets = {"actor.num_workers": ranks, "rollout.num_engines": max(1, ranks // one)}
    return translated(f"{ranks} ranks, with engines on the same GPUs", sets)


def _vllm(run: Run, value: Any) -> Outcome:
    server = run.get("use_vllm") and run.get("vllm_mode") == "server"
    said = "engines have GPUs of their own" if server else "vLLM engines and ranks take turns on the same GPUs"
    return translated(said, {"trainer.colocate": "none" if server else "time"})


def _memory(run: Run, value: Any) -> Outcome:
    if not run.get("use_vllm") and "vllm_gpu_memory_utilization" not in run.given:
        return instead("vLLM's own share")
    return same("rollout.vllm.gpu_memory_utilization", value)


def _loss(run: Run, value: Any) -> Outcome:
    level, loss = run.get("importance_sampling_level"), run.get("loss_type")
    if loss not in LOSSES:
        return refused(f"there is no loss {loss}; there are {', '.join(LOSSES)}")
    policy, weights = LOSSES[loss]
    if level == "sequence" and policy == "clip":
        policy = "gspo"
    elif level != "token":
        return refused(f"the ratio is one of a token or of a response, not {level} with {loss}")
    sets = {"algorithm.policy_loss": policy, "algorithm.loss_agg_mode": weights}
    return translated(", ".join(f"`{key}`={one}" for key, one in sets.items()), sets)


def _high(run: Run, value: Any) -> Outcome:
    if value is None:
        return translated("the same as epsilon", {"algorithm.clip_ratio_high": run.get("epsilon")})
    return same("algorithm.clip_ratio_high", value)


def _delta(run: Run, value: Any) -> Outcome:
    if value is None:
        return instead("`algorithm.clip_ratio_c` bounds ratios of negative advantages at 10 (dual clip)")
    return same("algorithm.clip_ratio_c", value)


def _scaled(run: Run, value: Any) -> Outcome:
    std, whiten = "algorithm.advantage.normalize_by_std", "algorithm.advantage.whiten"
    if value in (True, "group"):
        return translated("by the group's standard deviation", {std: True})
    if value in (False, "none"):
        return translated("not scaled", {std: False})
    if value == "batch":
        return translated("by that of the batch", {std: False, whiten: True})
    return refused(f"scale_rewards is group, batch or none, not {value}")


def _aggregated(run: Run, value: Any) -> Outcome:
    if value == "sum_then_normalize":
        return translated("`group`", {"algorithm.advantage.function": "group"})
    sets = {"algorithm.advantage.function": "gdpo", "algorithm.advantage.whiten": True}
    return translated("`gdpo`, whitened", sets)


def _corrected(run: Run, value: Any) -> Outcome:
    key, mode = "algorithm.rollout_correction", str(run.get("vllm_importance_sampling_mode"))
    if not run.get("use_vllm") or not run.get("vllm_importance_sampling_correction"):
        return instead("off: `algorithm.rollout_correction.mode` is none")
    level, _, how = mode.partition("_")
    if level not in LEVELS or how not in ("truncate", "mask"):
        return refused(f"the correction truncates or masks tokens or sequences, not {mode}")
    high = run.get("vllm_importance_sampling_clip_max")
    high = run.given.get("vllm_importance_sampling_cap") or high
    sets = {f"{key}.mode": how, f"{key}.level": LEVELS[level]} | ({f"{key}.upper": high} if high else {})
    if how == "mask":
        sets[f"{key}.lower"] = run.get("vllm_importance_sampling_clip_min") or SMALLEST
    return translated(f"{how} per {level}", sets)


def _steps(run: Run, value: Any) -> Outcome:
    if value is None or value <= 0:
        return instead("the epochs say it")
    updates = max(1, int(value) // _optimizer_steps(run))
    return translated(f"{value} optimizer steps are {updates} updates", {"trainer.total_steps": updates})


def _updates(run: Run) -> int | None:
    if (steps := run.get("max_steps")) and steps > 0:
        return max(1, int(steps) // _optimizer_steps(run))
    files = run.given.get("dataset_name") or run.given.get("GRPOTrainer.train_dataset")
    rows = rows_of(files) if files else None
    prompts = max(1, _per_generation(run) // int(run.get("num_generations")))
    return rows and max(1, int(rows * float(run.get("num_train_epochs"))) // prompts)


def _epochs(run: Run, value: Any) -> Outcome:
    if (run.get("max_steps") or -1) > 0 and value is not None:
        return instead("max_steps counts")
    steps = _updates(run)
    if steps is None:
        prompts = max(1, _per_generation(run) // int(run.get("num_generations")))
        return instead(
            f"`trainer.total_steps` counts updates and keeps dapo's default: the rows are not here; give it {value} x "
            f"rows / {prompts}"
        )
    return translated(f"{value} epochs are {steps} updates", {"trainer.total_steps": steps})


def _warmup(run: Run, value: Any) -> Outcome:
    key, steps, ratio = "actor.optim.lr_warmup_steps", run.get("warmup_steps") or 0, run.get("warmup_ratio") or 0.0
    if isinstance(steps, float) and 0 < steps < 1:
        steps, ratio = 0, steps
    if steps or not ratio:
        return translated("in optimizer steps", {key: int(steps), "actor.optim.lr_scheduler_unit": "optimizer_step"})
    updates = _updates(run)
    if updates is None:
        return refused(
            f"`{key}` counts steps, and their number is not known here; give it {ratio} x `trainer.total_steps`"
        )
    return translated(f"{ratio} of {updates} updates", {key: int(ratio * updates)})


def _scheduler(run: Run, value: Any) -> Outcome:
    if value == "constant" and (run.get("warmup_steps") or run.get("warmup_ratio")):
        return instead("constant has no warm-up in transformers")
    return same("actor.optim.lr_scheduler", value)


def _betas(run: Run, value: Any) -> Outcome:
    betas = [run.given.get("adam_beta1", 0.9), run.given.get("adam_beta2", 0.999)]
    return translated("both decays", {"actor.optim.betas": betas})


def _every(key: str) -> Any:
    def rule(run: Run, value: Any) -> Outcome:
        if key == "checkpoint.every" and run.given.get("save_strategy") in ("no", "epoch"):
            return instead(f"save_strategy={run.given['save_strategy']} counts")
        if key == "eval.every" and run.get("eval_strategy") != "steps":
            return instead("eval_strategy counts")
        if value is None or value <= 0 or not float(value).is_integer():
            return refused("a share of the run is no number of steps")
        steps = max(1, round(value / _optimizer_steps(run)))
        return translated(f"optimizer steps, {steps} updates", {key: steps})

    return rule


def _strategy(run: Run, value: Any) -> Outcome:
    if value == "no":
        return translated("none on the way", {"checkpoint.every": 0})
    if value == "epoch":
        return refused("`checkpoint.every` counts steps, not epochs")
    return instead("save_steps counts")


def _eval_strategy(run: Run, value: Any) -> Outcome:
    if value == "no":
        return translated("no evaluation on the way", {"eval.every": 0, "eval.before_train": False})
    return instead("eval_steps counts") if value == "steps" else refused("`eval.every` counts steps, not epochs")


def _report_to(run: Run, value: Any) -> Outcome:
    trackers = value if isinstance(value, list) else str(value).split(",")
    project, name = str(run.get("project")), run.given.get("run_name")
    sets: dict[str, Any] = {"logging.tensorboard": "tensorboard" in trackers or "all" in trackers}
    if "wandb" in trackers:
        sets["logging.wandb"] = {"project": project} | ({"name": name} if name else {})
    if "mlflow" in trackers:
        sets["logging.mlflow"] = {"tracking_uri": "${oc.env:MLFLOW_TRACKING_URI,mlruns}", "experiment": project}
    others = [one for one in trackers if one not in ("wandb", "mlflow", "tensorboard", "none", "all")]
    said = "`metrics.jsonl` is always written"
    return translated(said + (f"; there is no {', '.join(map(str, others))}" if others else ""), sets)


def _dtype(run: Run, value: Any) -> Outcome:
    if value in (True, "bfloat16", "bf16"):
        return same("model.dtype", "bfloat16")
    if value in (False, None, "auto"):
        return instead("`model.dtype` is bfloat16")
    return same("model.dtype", value)


def _half(run: Run, value: Any) -> Outcome:
    return translated("float16", {"model.dtype": "float16"}) if value is True else instead("off, here too")


def _checkpointing(run: Run, value: Any) -> Outcome:
    return translated("full" if value else "none", {"model.gradient_checkpointing": "full" if value else "none"})


def _head(run: Run, value: Any) -> Outcome:
    return translated("float32", {"model.head_dtype": "float32"}) if value else instead("off, here too")


def _init(run: Run, value: Any) -> Outcome:
    if value in OFF:
        return instead("none")
    known = {"attn_implementation": "model.attn_implementation", "dtype": "model.dtype", "torch_dtype": "model.dtype"}
    known["trust_remote_code"] = "model.trust_remote_code"
    rest = [name for name, one in value.items() if name not in (*known, "device_map", "use_cache") and one not in OFF]
    if rest:
        return refused(f"{', '.join(rest)}: models are loaded in dapo's own way")
    sets = {known[name]: one for name, one in value.items() if name in known and one not in (*OFF, "auto")}
    return translated("its entries, each a key", sets)


def _data(run: Run, value: Any) -> Outcome:
    key = "data.train_files"
    if isinstance(value, list):
        name, *rest = [one for one in value if one is not None]
        if len(rest) > 1:
            return refused(f"{name} has the parts {' '.join(map(str, rest))}; give NAME:CONFIG:SPLIT")
        value = f"{name}:{rest[0]}:{run.get('dataset_train_split') or 'train'}" if rest else name
    return translated("rows as the set has them; changes that a script makes are not", {key: [value]})


def _held_out(run: Run, value: Any) -> Outcome:
    if value is None or run.get("eval_strategy") == "no":
        return instead("without evaluation: `data.val_files` is empty")
    name = next((one for one in value if one is not None), None) if isinstance(value, list) else value
    return refused(f"`data.val_files` takes files, whose split the path says; give that of {name}")


def _rewards(run: Run, value: Any) -> Outcome:
    items = value if isinstance(value, list) else [value]
    weights = run.given.get("reward_weights") or [1.0] * len(items)
    if len(weights) != len(items):
        return refused(f"{len(weights)} weights for {len(items)} functions")
    entries: list[dict[str, Any]] = []
    sets: dict[str, Any] = {}
    said: list[str] = []
    for item, weight in zip(items, weights, strict=True):
        entry = item if isinstance(item, dict) else _named(item)
        if entry is None:
            sets |= {"reward.model.path": item, "reward.model.weight": weight}
        elif entry["name"] == "get_soft_overlong_punishment":
            kwargs = entry.get("kwargs", {"max_completion_len": 1280, "soft_punish_cache": 256})
            sets |= {"reward.overlong_buffer.enable": True, "reward.overlong_buffer.penalty_factor": weight}
            sets["reward.overlong_buffer.len"] = kwargs.get("soft_punish_cache")
        else:
            entries.append({"path": entry["path"], "name": entry["name"], "weight": weight})
            if entry["path"] == "my_reward.py":
                said.append(f"move {entry['name']} from the script to my_reward.py, with what it needs")
            elif entry["path"] in OF_TRL.values():
                said.append("TRL's functions need its package on every node")
    if not entries and "reward.model.path" not in sets:
        return refused("no function says what is right")
    sets |= {"reward.functions": entries or [{"path": "math", "weight": 0.0}]}
    return translated("; ".join(["`reward.functions`", *dict.fromkeys(said)]), sets)


def _named(name: str) -> dict[str, Any] | None:
    if name in OF_TRL:
        return {"path": OF_TRL[name], "name": name}
    module, _, function = str(name).rpartition(".")
    return {"path": module, "name": function} if module and "/" not in str(name) else None


def _reward_model(run: Run, value: Any) -> Outcome:
    if value in OFF:
        return instead("none")
    sets: dict[str, Any] = {"reward.model.path": value}
    if "reward_funcs" not in run.given:
        sets["reward.functions"] = [{"path": "math", "weight": 0.0}]
    return translated("a classifier with one label", sets)


def _no_overlong(run: Run, value: Any) -> Outcome:
    given = [run.given.get(name) for name in ("reward_funcs", "GRPOTrainer.reward_funcs")]
    if "get_soft_overlong_punishment" in str(given):
        return instead("it is one of the reward functions")
    return translated("TRL has none of its own", {"reward.overlong_buffer.enable": False})


def _weights(run: Run, value: Any) -> Outcome:
    return instead("no weights") if value in OFF else translated("`weight` of each entry of `reward.functions`", {})


def _adapters(run: Run, value: Any) -> Outcome:
    if value is None:
        return instead("all weights are trained")
    return refused("its adapters are not known without running it; give `model.lora.rank` and `model.lora.alpha`")


def _peft(key: str) -> Any:
    def rule(run: Run, value: Any) -> Outcome:
        if key.endswith("modules"):
            return same(key, value) if isinstance(value, list) else translated("a list", {key: [value]})
        return same(key, value)

    return rule


def _cpu(run: Run, value: Any) -> Outcome:
    return translated("cpu", {"trainer.device": "cpu", "model.dtype": "float32"}) if value else instead("off, here too")


def _resume(run: Run, value: Any) -> Outcome:
    if value in (*OFF, True):
        return instead("`checkpoint.resume` is auto: the run in the output directory goes on")
    return refused("a run goes on from a checkpoint of dapo's; give TRL's as `model.path`")


def _optimizer(run: Run, value: Any) -> Outcome:
    return instead("AdamW, here too") if "adamw" in str(value) else refused(f"AdamW trains, not {value}")


def _model(run: Run, value: Any) -> Outcome:
    return same("model.path", value)


def _min_p(run: Run, value: Any) -> Outcome:
    return instead("off, here too") if value is None else same("rollout.min_p", value)


def _masked(run: Run, value: Any) -> Outcome:
    return same("reward.overlong_filtering.enable", bool(value))


def _filtered(run: Run, value: Any) -> Outcome:
    return translated("TRL trains on every group", {"filter_groups.enable": False})


def _off_policy(run: Run, value: Any) -> Outcome:
    key = "algorithm.rollout_correction.off_policy_mask_threshold"
    return instead("off, here too") if value is None else same(key, value)


def _repeated(run: Run, value: Any) -> Outcome:
    return instead("off, here too") if value == 1 else refused(said_of("repetition_penalty", TRL))


def _count(run: Run, value: Any) -> Outcome:
    return instead("`eval.n`") if value is None else same("eval.n", value)


DEFAULTS |= {"(overlong punishment)": None, "(dynamic sampling)": None, "delta": None}


def _push(run: Run, value: Any) -> Outcome:
    repository = run.get("hub_model_id")
    if not run.get("push_to_hub"):
        return instead("nothing is pushed")
    if not isinstance(repository, str) or "/" not in repository:
        return refused("`checkpoint.push_to_hub` is a repository: give OWNER/NAME as hub_model_id")
    return translated("`checkpoint.push_to_hub`, a repository", {"checkpoint.push_to_hub": repository})


RULES: Rules = {
    **dict.fromkeys(("push_to_hub", "hub_model_id"), _push),
    "(overlong punishment)": _no_overlong,
    "[*][*]*": lambda run, value: refused("its entries are not known without running it"),
    "(dynamic sampling)": _filtered,
    "num_processes": _ranks,
    "GRPOTrainer.model": _model,
    "model_init_kwargs": _init,
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), _batches),
    **dict.fromkeys(("generation_batch_size", "steps_per_generation"), _batches),
    "num_generations_eval": _count,
    "min_p": _min_p,
    "repetition_penalty": _repeated,
    "use_vllm": _vllm,
    "vllm_mode": _vllm,
    "vllm_gpu_memory_utilization": _memory,
    "loss_type": _loss,
    "importance_sampling_level": _loss,
    "epsilon_high": _high,
    "delta": _delta,
    "scale_rewards": _scaled,
    "multi_objective_aggregation": _aggregated,
    **{f"vllm_importance_sampling_{name}": _corrected for name in ("correction", "mode", "cap", "clip_*")},
    "off_policy_mask_threshold": _off_policy,
    "mask_truncated_completions": _masked,
    "max_steps": _steps,
    "num_train_epochs": _epochs,
    "warmup_steps": _warmup,
    "warmup_ratio": _warmup,
    "lr_scheduler_type": _scheduler,
    "adam_beta[12]": _betas,
    "save_steps": _every("checkpoint.every"),
    "eval_steps": _every("eval.every"),
    "save_strategy": _strategy,
    "eval_strategy": _eval_strategy,
    "report_to": _report_to,
    **dict.fromkeys(("bf16", "dtype", "torch_dtype"), _dtype),
    "fp16": _half,
    "gradient_checkpointing": _checkpointing,
    "cast_lm_head_to_fp32": _head,
    "dataset_name": _data,
    "GRPOTrainer.train_dataset": _data,
    "GRPOTrainer.eval_dataset": _held_out,
    "reward_funcs": _rewards,
    "GRPOTrainer.reward_funcs": _rewards,
    "reward_weights": _weights,
    "reward_model_name_or_path": _reward_model,
    "GRPOTrainer.peft_config": _adapters,
    "*lora_target_modules": _peft("model.lora.target_modules"),
    "LoraConfig.target_modules": _peft("model.lora.target_modules"),
    "use_cpu": _cpu,
    "resume_from_checkpoint": _resume,
    "optim": _optimizer,
}
