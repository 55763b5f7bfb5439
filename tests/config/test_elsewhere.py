"""Keys of verl, TRL, vLLM and argparse on the command line: each leads to ours, which exist."""

import re

import pytest

from dapo.config import elsewhere
from dapo.config.names import is_open, known_keys
from tests.support.overrides import said


@pytest.mark.parametrize(
    ("argument", "ours"),
    [
        pytest.param("num_generations=8", "it is TRL's name; here it is `rollout.n`", id="trl"),
        pytest.param("learning_rate=1e-6", "it is TRL's name; here it is `actor.optim.lr`", id="trl learning rate"),
        pytest.param("loss_type=dapo", "`algorithm.policy_loss` or `algorithm.loss_agg_mode`", id="two of ours"),
        pytest.param(
            "actor_rollout_ref.rollout.n=8", "it is verl's name; here it is `rollout.n`", id="verl, the same last part"
        ),
        pytest.param("algorithm.kl_ctrl.kl_coef=1", "here it is `algorithm.kl.reward_coeff`", id="verl"),
        pytest.param("trainer.save_freq=5", "here it is `checkpoint.every`", id="verl, a section that we have"),
        pytest.param(
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "did you mean the engine argument `rollout.vllm.tensor_parallel_size`?",
            id="verl, engine",
        ),
        pytest.param(
            "vllm_gpu_memory_utilization=0.4",
            "engine argument `rollout.vllm.gpu_memory_utilization`?",
            id="trl, engine",
        ),
        pytest.param("max_num_seqs=4", "engine argument `rollout.vllm.max_num_seqs`?", id="vLLM"),
        pytest.param("--rollout.n=4", "is not an option: keys take no dashes; write `rollout.n=4`", id="argparse"),
        pytest.param("--rollout.n", "keys take no dashes; write `rollout.n=VALUE`", id="argparse, no value"),
        pytest.param("--num-generations=8", "here it is `rollout.n`", id="argparse and TRL"),
    ],
)
def test_names_of_other_systems_lead_to_ours(argument: str, ours: str) -> None:
    [line] = said(argument).splitlines()
    assert argument.split("=")[0] in line and ours in line


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ("trainer.logger", "`logging.wandb`"),
        ("trainer.experiment_name", "here it is `logging.wandb`"),
        ("actor_rollout_ref.actor.optim.clip_grad", "here it is `actor.optim.grad_clip`"),
        ("reward.reward_kwargs.overlong_buffer_cfg.len", "here it is `reward.overlong_buffer.len`"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.enable", "here it is `reward.overlong_buffer.enable`"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.seed_x", "here it is `rollout.vllm.seed_x`"),
        ("actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes", "`weight_sync.bucket_bytes`"),
        ("vllm_importance_sampling_clip_max", "here it is `algorithm.rollout_correction.upper`"),
        ("vllm_importance_sampling_clip_min", "here it is `algorithm.rollout_correction.lower`"),
        ("entropy_coef", "it is TRL's name; here it is `algorithm.entropy_coeff`"),
        ("data.truncation", "`data.max_prompt_length` are dropped; leave it out"),
        ("data.prompt_key", "here `data.format`"),
        ("algorithm.filter_groups.metric", "as with `acc`; for anything else write `filter_groups.function`"),
        ("algorithm.use_kl_in_reward", "here `algorithm.kl.reward_coeff`"),
        ("algorithm.rollout_correction.rollout_rs", "here it is `algorithm.rollout_correction.mode=mask`"),
        ("actor_rollout_ref.actor.use_kl_loss", "here `algorithm.kl.loss_coeff`"),
        ("actor_rollout_ref.actor.clip_ratio", "`algorithm.clip_ratio_low` and `algorithm.clip_ratio_high`"),
        ("actor_rollout_ref.actor.use_dynamic_bsz", "`actor.max_tokens_per_gpu`"),
        ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", "`actor.max_tokens_per_gpu`"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload", "with their settings; leave it out"),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample", "`eval.temperature`"),
        ("actor_rollout_ref.rollout.multi_turn.enable", "here `rollout.function.path`"),
        ("reward_model.reward_manager", "here `reward.functions` and `reward.overlong_buffer`"),
        ("reward_model.enable", "here `reward.model.path`"),
        ("custom_reward_function.path", "here write reward.functions=[{path: my_reward.py"),
        ("trainer.total_epochs", "here `trainer.total_steps` counts updates, not epochs"),
        ("trainer.balance_batch", "leave it out"),
    ],
)
def test_each_key_of_a_dapo_script_of_verl_says_what_to_write(theirs: str, words: str) -> None:
    [line] = said(f"+{theirs}=1").splitlines()
    assert line.startswith(f"unknown key `{theirs}`; it is ") and words in line


@pytest.mark.parametrize("words", sorted({*elsewhere.VERL.values(), *elsewhere.TRL.values()}))
def test_keys_that_are_named_for_those_of_other_systems_exist(words: str) -> None:
    keys = [key.partition("=")[0] for key in re.findall(r"`([a-z_]+\.[a-z_.=]+)`", words)]
    assert not [key for key in keys if key not in known_keys() and not is_open(key) and key != "samples.sqlite"]
