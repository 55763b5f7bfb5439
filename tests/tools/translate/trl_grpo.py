"""A GRPO run as TRL's users write it; running it would fail."""

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment, think_format_reward

LENGTH = 1024
MODEL = "/models/Qwen2.5-0.5B"


def right(completions, solution, **kwargs):
    return [float(each[0]["content"] == one) for each, one in zip(completions, solution, strict=True)]


dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
dataset = dataset.map(lambda row: row)
args = GRPOConfig(
    output_dir=f"outputs/{MODEL}",
    num_generations=8,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2 * 4,
    steps_per_generation=16,
    max_completion_length=LENGTH * 2,
    max_steps=400,
    save_steps=100,
    epsilon_high=0.28,
    loss_type="dr_grpo",
    scale_rewards=False,
    mask_truncated_completions=True,
    use_vllm=True,
    vllm_importance_sampling_mode="token_truncate",
    vllm_importance_sampling_cap=2.0,
    reward_weights=[1.0, 0.5, 0.25],
    report_to=["wandb"],
    run_name="mine",
)
args.beta = 0.04
raise RuntimeError("it was executed")
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[right, think_format_reward, get_soft_overlong_punishment(LENGTH, soft_punish_cache=256)],
    args=args,
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
