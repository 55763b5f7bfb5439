"""Prints what a run needs before a GPU is rented: `python -m dapo.plan [--job] [+experiment=NAME] [key=value ...]`.

Prints memory per GPU and phase, an engine's KV cache, disk, and the work and estimated time of one step, with their
arithmetic, and what each setting of speed would bring. The assumptions are keys of `plan`. If something cannot fit,
exits with 1 and the keys to change. With `--job`, prints what `launch/slurm/train.sbatch` reads instead: how many
seconds before a time limit to signal the run, its output directory, and what it resumes from. Starts no worker and
needs no network: the shapes of the shipped experiments' models are included (`dapo.config.facts.model_shape`).
"""

import sys
from collections.abc import Iterator, Sequence

from dapo.config.compose import compose
from dapo.config.facts.model_shape import ModelShape, read_config, shape_of
from dapo.config.paths import output_path
from dapo.config.plan import PlannedConfig
from dapo.config.rules.model import architecture_problems, heads_problems
from dapo.ground.console import end, say
from dapo.tools.plan.actor import ELEMENT_BYTES
from dapo.tools.plan.engine import KV_BYTES
from dapo.tools.plan.fit import problems
from dapo.tools.plan.report import report
from dapo.tools.plan.step import Lead

JOB = "--job"


def configuration(overrides: Sequence[str]) -> PlannedConfig:
    cfg = compose(overrides, plan=True)
    assert isinstance(cfg, PlannedConfig)
    return cfg


def known_shape(cfg: PlannedConfig) -> ModelShape:
    """Raises ValueError if the model is unknown, or cannot run or be planned with this configuration."""
    shape = shape_of(read_config(cfg.model.path), cfg.model.path)
    if found := [*refusals(cfg), *unpredictable(cfg)]:
        raise ValueError("\n".join(found))
    return shape


def refusals(cfg: PlannedConfig) -> list[str]:
    """Returns why the model cannot run with this configuration. Raises UnknownShape if the model has no config.json."""
    config = read_config(cfg.model.path)
    return [*heads_problems(cfg, config), *architecture_problems(cfg, config)]


def unpredictable(cfg: PlannedConfig) -> Iterator[str]:
    """Yields assumptions that contradict the configuration, and settings that the planner does not support."""
    mean, cap, args = cfg.plan.mean_response_tokens, cfg.data.max_response_length, cfg.rollout.vllm
    if mean > cap:
        yield f"`plan.mean_response_tokens` ({mean}) must be at most `data.max_response_length` ({cap})"
    for name, known in (("dtype", ELEMENT_BYTES), ("kv_cache_dtype", KV_BYTES), ("quantization", ())):
        if args.get(name) and args[name] not in known:
            yield f"`rollout.vllm.{name}` ({args[name]}): the planner does not know what this takes; plan without it"


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != JOB]
    if {"-h", "--help"} & set(arguments):
        say(__doc__)
        return
    for_launcher = len(arguments) < len(sys.argv) - 1
    try:
        cfg = configuration(arguments)
        if for_launcher:
            # whether or not the planner knows the model
            say(f"output_dir {output_path(cfg.trainer.output_dir)}\nresume {cfg.checkpoint.resume}")
        shape = known_shape(cfg)
    except ValueError as error:
        end(str(error), 1)
    if for_launcher:
        say(f"lead_s {Lead(cfg, shape).seconds}")
        return
    say(report(cfg, shape))
    if found := problems(cfg, shape):
        end("\n".join(found), 1)


if __name__ == "__main__":
    main()
