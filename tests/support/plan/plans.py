"""Plans of experiments, each made once."""

import functools

from dapo.tools.plan.__main__ import configuration, known_shape
from dapo.tools.plan.step import Step


@functools.cache
def planned(*overrides, experiment="dapo_qwen32b"):
    cfg = configuration([f"+experiment={experiment}", *overrides])
    return cfg, known_shape(cfg)


GPUS = {"H100": (), "H200": ("plan.gpu_memory_bytes=141e9", "plan.gpu_bandwidth=4.8e12")}


def benched(model, tokens, gpu, *overrides):
    """The step of an update as `python -m dapo.bench device` measures it: four sequences of `tokens`, each alone in a
    micro-batch of one rank."""
    prompt = tokens // 8
    cfg, shape = planned(
        *(f"model.path=Qwen/Qwen2.5-{model}", "model.gradient_checkpointing=full", "rollout.n=4", *GPUS[gpu]),
        *(f"data.max_prompt_length={prompt}", f"data.max_response_length={tokens - prompt}"),
        *(f"plan.mean_prompt_tokens={prompt}", f"plan.mean_response_tokens={tokens - prompt}"),
        *("actor.num_workers=1", f"actor.max_tokens_per_gpu={tokens}", "reward.overlong_buffer.enable=false"),
        *("data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "data.gen_batch_size=1", *overrides),
        experiment="dapo_qwen7b",
    )
    return Step(cfg, shape)
