#!/usr/bin/env bash
set -xeuo pipefail
# A DAPO run as verl's users write it: comments, defaults, arithmetic, arrays, a test.
max_prompt_length=$((1024 * 2)); max_response_length=$((1024 * 8))
enable_filter_groups=True
train_prompt_bsz=512
NNODES=${NNODES:-2}
MODEL_PATH=${MODEL_PATH:-"/models/Qwen2.5-7B"}
TRAIN_FILE="/data/math.parquet"
rollout_mode="async"
if [ "$rollout_mode" = "async" ]; then
    return_raw_chat="True"
elif [ -n "$rollout_mode" ]; then
    return_raw_chat="False"
fi
KL=(
    actor_rollout_ref.actor.use_kl_loss=True  # a comment in an array
    actor_rollout_ref.actor.kl_loss_coef=0.001
)
STARTED=$(touch executed; date)
export VLLM_USE_V1=1
cat << EOF > executed
data.train_files=of-a-here-document
EOF

ray job submit --no-wait --working-dir "${PWD}" -- \
    python3 -m recipe.dapo.main_dapo \
    data.train_files="${TRAIN_FILE}" \
    data.val_files="['/data/a.parquet', '/data/b.parquet']" \
    data.truncation='left' data.return_raw_chat=${return_raw_chat} \
    data.max_prompt_length=${max_prompt_length} data.max_response_length=$max_response_length \
    data.train_batch_size=${train_prompt_bsz} data.gen_batch_size=$((train_prompt_bsz * 3)) \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=${enable_filter_groups} algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    actor_rollout_ref.model.path="$MODEL_PATH" +actor_rollout_ref.model.override_config.embd_pdrop=0. \
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn=True \
    actor_rollout_ref.rollout.val_kwargs.n=32 actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length)) \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=$((1024 * 4)) \
    trainer.logger='["console","wandb"]' trainer.project_name=DAPO trainer.experiment_name="run-$STARTED" \
    trainer.nnodes="$NNODES" trainer.n_gpus_per_node=8 trainer.total_epochs=3 trainer.total_training_steps=200 \
    trainer.default_local_dir="/ckpts/${MODEL_PATH##*/}" trainer.resume_mode=auto \
    "${KL[@]}" $@ 2>&1 | tee log.txt
