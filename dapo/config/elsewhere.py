"""Hints for verl and TRL keys without an equivalent here. Keys with an equivalent are named at its field (`verl`,
`trl`)."""

from fnmatch import fnmatchcase

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
_CORRECTION = "algorithm.rollout_correction"
_PACKED = "sequences are always packed, up to `actor.max_tokens_per_gpu` tokens; leave it out"
_LOGGED = "`samples.sqlite` in `trainer.output_dir` holds every group; leave it out"
_NO_CRITIC = "no critic is trained; leave it out"
_DROPPED = "prompts longer than `data.max_prompt_length` are dropped; leave it out"
_COLUMNS = "`data.format` says which columns the files have"
_MANAGER = "`reward.functions` and `reward.overlong_buffer` say it"
_FILE = "write reward.functions=[{path: my_reward.py, name: compute_score, kwargs: {}}]"
_SCHEDULE = "`actor.optim.lr_scheduler` and `actor.optim.lr_scheduler_kwargs` say it"
_GREEDY = "training always samples, and evaluation does unless `eval.temperature` is 0; leave it out"
_UPDATES = "`trainer.total_steps` counts updates, not epochs"

VERL = {  # shell patterns; the first match counts
    "data.prompt_key": _COLUMNS,
    "data.reward_fn_key": _COLUMNS,
    "data.truncation": _DROPPED,
    "data.filter_overlong_prompts*": _DROPPED,
    "data.return_*": "messages are always rendered by the tokenizer's chat template; leave it out",
    "data.val_batch_size": "held-out prompts wait for free engines, in no batches; leave it out",
    "data.tokenizer": "`model.path` has the tokenizer",
    "data.trust_remote_code": "it is `model.trust_remote_code`",
    "algorithm.use_kl_in_reward": "`algorithm.kl.reward_coeff` above 0 switches it on",
    "algorithm.kl_ctrl.*": "`algorithm.kl.reward_coeff` stays as it is given; leave it out",
    "algorithm.filter_groups.metric": (
        "a group counts by its accuracies, as with `acc`; for anything else write `filter_groups.function` "
        "(dapo/algorithm/own/README.md)"
    ),
    "algorithm.filter_groups.max_inflight_gen_batches": "`data.gen_batch_size` bounds the draws in flight",
    "algorithm.gamma": _NO_CRITIC,
    "algorithm.lam": _NO_CRITIC,
    f"{_CORRECTION}.rollout_rs*": "it is `algorithm.rollout_correction.mode=mask`, with `lower` and `upper`",
    f"{_CORRECTION}.rollout_is_batch_normalize": "weights are not normalized over the batch; leave it out",
    f"{_CORRECTION}.loss_type": "it is `algorithm.policy_loss`",
    f"{_ACTOR}.use_kl_loss": "`algorithm.kl.loss_coeff` above 0 switches it on",
    f"{_ACTOR}.clip_ratio": "it is `algorithm.clip_ratio_low` and `algorithm.clip_ratio_high`",
    f"{_ACTOR}.use_token_level_loss": "it is `algorithm.loss_agg_mode`: true is token-mean",
    f"{_ACTOR}.loss_scale_factor": "`data.max_response_length` is what seq-mean-token-sum-norm divides by",
    f"{_ACTOR}.tis_imp_ratio_cap": "it is `algorithm.rollout_correction.upper`, with `mode=truncate`",
    f"{_ACTOR}.strategy": "FSDP2 always trains; leave it out",
    f"{_ACTOR}.ppo_micro_batch_size*": _PACKED,
    f"{_ACTOR}.use_dynamic_bsz": _PACKED,
    f"{_ACTOR}.entropy_*": "entropies are always computed in chunks; leave it out",
    f"{_ACTOR}.calculate_entropy": "the entropy is always a metric; leave it out",
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": "`actor.optim.lr_warmup_steps` counts steps",
    f"{_ACTOR}.optim.warmup_style": _SCHEDULE,
    f"{_ACTOR}.optim.min_lr_ratio": _SCHEDULE,
    f"{_ACTOR}.optim.num_cycles": _SCHEDULE,
    f"{_ACTOR}.optim.total_training_steps": "it is `trainer.total_steps`",
    f"{_ACTOR}.fsdp_config.offload_policy": "it is `actor.offload`: host",
    f"{_ACTOR}.fsdp_config.dtype": "it is `model.dtype`",
    f"{_ACTOR}.fsdp_config.model_dtype": "master weights are always float32; `model.dtype` is the compute type",
    f"{_MODEL}.use_remove_padding": _PACKED,
    f"{_MODEL}.override_config.*": "the model's own config.json holds; leave it out, or change it there",
    "actor_rollout_ref.ref.*": "the reference runs on the actors' ranks, with their settings; leave it out",
    "actor_rollout_ref.nccl_timeout": "it is `actor.timeout_s`",
    f"{_ROLLOUT}.log_prob_*": _PACKED,
    f"{_ROLLOUT}.name": "vLLM always generates; leave it out",
    f"{_ROLLOUT}.mode": "responses always flow one at a time; leave it out",
    f"{_ROLLOUT}.calculate_log_probs": "log-probabilities are always kept; leave it out",
    f"{_ROLLOUT}.do_sample": _GREEDY,
    f"{_ROLLOUT}.val_kwargs.do_sample": _GREEDY,
    f"{_ROLLOUT}.prompt_length": "it is `data.max_prompt_length`",
    f"{_ROLLOUT}.response_length": "it is `data.max_response_length`",
    f"{_ROLLOUT}.free_cache_engine": "`trainer.colocate=time` lets engines sleep while the actors train",
    f"{_ROLLOUT}.data_parallel_size": "it is `rollout.num_engines`",
    f"{_ROLLOUT}.expert_parallel_size": "it is `rollout.vllm.enable_expert_parallel`",
    "actor_rollout_ref.actor.router_replay.mode": "`rollout.replay_experts=true` is R3; leave it out",
    f"{_ROLLOUT}.multi_turn.*": "`rollout.function.path` names a function for several turns",
    f"{_ROLLOUT}.agent.*": "`rollout.function.path` names a function for several turns",
    "custom_reward_function.overlong_buffer.*": "it is in `reward.overlong_buffer`",
    "custom_reward_function.*": _FILE,
    "reward.custom_reward_function*": _FILE,
    "reward*.overlong_buffer*.log": "the punishment is always a metric; leave it out",
    "reward*.reward_kwargs.max_resp_len": "it is `data.max_response_length`",
    "reward_model.enable": "`reward.model.path` switches a reward model on",
    "reward.reward_model.enable": "`reward.model.path` switches a reward model on",
    "reward_model.launch_reward_fn_async": "responses are always scored while others are generated; leave it out",
    "reward*.reward_manager*": _MANAGER,
    "*sandbox_fusion.*": "the function `code` has a sandbox of its own, `reward.limits.sandbox`",
    "critic.*": _NO_CRITIC,
    "trainer.critic_warmup": _NO_CRITIC,
    "trainer.max_critic_ckpt_to_keep": _NO_CRITIC,
    "trainer.total_epochs": _UPDATES,
    "trainer.val_only": "`python -m dapo.evaluate` does that",
    "trainer.*_data_dir": _LOGGED,
    "trainer.balance_batch": "the work of the ranks is always balanced; leave it out",
    "ray_*init.*": "`trainer.ray_address` names a running cluster",
}
TRL = {
    "num_train_epochs": _UPDATES,
    "per_device_train_batch_size": _PACKED,
    "gradient_accumulation_steps": _PACKED,
    "generation_batch_size": "`data.train_batch_size` counts prompts, not responses",
    "steps_per_generation": "`data.train_batch_size` / `actor.ppo_mini_batch_size` says it",
    "use_vllm": "vLLM always generates; leave it out",
    "warmup_ratio": "`actor.optim.lr_warmup_steps` counts steps",
    "vllm_importance_sampling_correction": "it is `algorithm.rollout_correction.mode`",
}


def instead(name: str) -> str:
    """Returns the hint for another system's key, for the end of an error message; empty if the key is not listed."""
    for system, words in (("verl", VERL), ("TRL", TRL)):
        for pattern, said in words.items():
            if fnmatchcase(name, pattern):
                return f"it is {system}'s name; here {said}"
    return ""
