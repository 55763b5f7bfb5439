"""Plans of experiments, each made once."""

import functools

from dapo.tools.plan.__main__ import configuration, known_shape
from dapo.tools.plan.actor import ActorMemory
from dapo.tools.plan.fit import changed
from dapo.tools.plan.step import Step


@functools.cache
def planned(*overrides, experiment="dapo_qwen32b"):
    cfg = configuration([f"+experiment={experiment}", *overrides])
    return cfg, known_shape(cfg)


GPUS = {"H100": (), "H200": ("plan.gpu_memory_bytes=150e9", "plan.gpu_bandwidth=4.8e12")}


def benched(model, tokens, gpu, *overrides, ranks=1):
    """The step of an update as `python -m dapo.bench device` measures it: four sequences of `tokens` on each rank, each
    alone in a micro-batch."""
    prompt = tokens // 8
    cfg, shape = planned(
        *(f"model.path=Qwen/Qwen2.5-{model}", "model.gradient_checkpointing=full", "rollout.n=4", *GPUS[gpu]),
        *(f"data.max_prompt_length={prompt}", f"data.max_response_length={tokens - prompt}"),
        *(f"plan.mean_prompt_tokens={prompt}", f"plan.mean_response_tokens={tokens - prompt}"),
        *(f"actor.num_workers={ranks}", f"actor.max_tokens_per_gpu={tokens}", "reward.overlong_buffer.enable=false"),
        *(f"{key}={ranks}" for key in ("data.train_batch_size", "data.gen_batch_size", "actor.ppo_mini_batch_size")),
        *overrides,
        experiment="dapo_qwen7b",
    )
    return Step(cfg, shape)


MEASURED = {  # MFU on one GPU
    **{("0.5B", 4096): 3.8, ("0.5B", 20480): 16.6, ("1.5B", 4096): 12.4, ("1.5B", 20480): 23.1},
    **{("7B", 4096): 27.3, ("7B", 20480): 31.9},
}
LEVERS = {
    "planned": {},
    "+ `fa3`": {"model.attn_implementation": "fa3"},
    "+ `compile`": {"actor.compile": True},
    "+ `selective`": {"model.gradient_checkpointing": "selective"},
    "or `none`": {"model.gradient_checkpointing": "none"},
}


def mfu_table():
    """Planned MFU, as it is in dapo/tools/bench/RESULTS.md; brackets: does not fit in the GPU's memory."""
    lines = [f"| model | GPUs | tokens | measured | {' | '.join(LEVERS)} |", f"|{'---|' * (4 + len(LEVERS))}"]
    fleets = (("0.5B", 1, "H100"), ("1.5B", 1, "H100"), ("7B", 1, "H200"), ("7B", 8, "H100"), ("32B", 64, "H100"))
    for model, ranks, gpu in fleets:
        for tokens in (4096, 20480, 32768):
            step = benched(model, tokens, gpu, ranks=ranks)
            cells = [str(MEASURED.get((model, tokens), "") if ranks == 1 else "")]
            for change in LEVERS.values():
                step = Step(changed(step.cfg, change), step.shape)
                fits = ActorMemory(step.cfg, step.shape).peak().total <= step.cfg.plan.gpu_memory_bytes
                cells.append(f"{100 * step.mfu:.1f}" if fits else f"({100 * step.mfu:.1f})")
            lines.append(f"| {model} | {ranks} {gpu} | {tokens:,} | {' | '.join(cells)} |")
    return "\n".join(lines)
