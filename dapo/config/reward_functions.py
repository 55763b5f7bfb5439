"""The names of reward functions: of the run, and of entries of `data.sources` that have their own."""

from collections.abc import Sequence
from pathlib import Path

from dapo.config.reward import RewardFunctionConfig
from dapo.config.sampling import SourceConfig

READY = ("math", "math_verify", "gsm8k", "code", "format", "overlong", "judge")  # modules of `PACKAGE`
PACKAGE = "dapo.rewards"
SECTION = "reward.functions"  # configuration section of the run's functions


def ready_name(path: str) -> str | None:
    """Returns `math` for `math` and for `dapo.rewards.math`; None for a user-defined function."""
    name = path.removeprefix(PACKAGE + ".")
    return name if name in READY else None


def labels(specs: Sequence[RewardFunctionConfig], section: str = SECTION) -> tuple[str, ...]:
    """Returns a unique name per function for metrics: a ready one's short name, else the function's name, or
    module.name if several share it."""
    names = [ready_name(spec.path) or spec.name for spec in specs]
    found: list[str] = []
    for index, (spec, name) in enumerate(zip(specs, names, strict=True)):
        module = Path(spec.path).stem if spec.path.endswith(".py") else spec.path
        taken = names.count(name) > 1 or name in READY or name == "reward_model"  # reserved for the worker
        label = f"{module}.{spec.name}" if taken and ready_name(spec.path) is None else name
        if label in found:
            raise ValueError(
                f"`{section}[{index}]` ({label}) has the name of `{section}[{found.index(label)}]`; "
                "rename one, or drop it if they are the same"
            )
        found.append(label)
    return tuple(found)


def section_of(entry: str) -> str:
    return f"data.sources[{entry}].functions"


def label_of(entry: str, label: str) -> str:
    return f"{entry}:{label}" if entry else label


def source_functions(sources: Sequence[SourceConfig]) -> dict[str, list[RewardFunctionConfig]]:
    return {source.name: source.functions for source in sources if source.functions}
