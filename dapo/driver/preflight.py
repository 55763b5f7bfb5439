"""Tries on the driver, before any worker starts, what only trying can tell: schedule, reward functions, installation.

In: a checked `Config`. Out: nothing, or a ValueError that lists every problem, each with key, value and remedy.
"""

import importlib.metadata
from collections.abc import Iterator

from dapo.config.schema import Config
from dapo.report.redact import redacted
from dapo.report.sinks import choice
from dapo.rewards.loading import LoadedFunction, labels, load, ready_name
from dapo.schedule import learning_rates


def preflight(cfg: Config) -> None:
    """Raises ValueError with one line per problem."""
    # A torchvision of the wrong build breaks the import of transformers, which the schedule needs.
    problems = [*_torchvision()] or [*_schedule(cfg), *_reward_functions(cfg), *choice.problems(cfg)]
    if problems:
        raise ValueError("\n".join(problems))


def _schedule(cfg: Config) -> Iterator[str]:
    """Builds the learning-rate schedule: transformers knows which arguments it takes."""
    try:
        learning_rates(cfg)
    except ValueError as error:
        yield str(error)


def _reward_functions(cfg: Config) -> Iterator[str]:
    functions = cfg.reward.functions
    if not functions:
        yield "`reward.functions` is empty; give at least one, such as {path: math}"
    for index, spec in enumerate(functions):
        try:
            function = load(spec, index=index)
        except ValueError as error:
            yield str(error)
            continue
        if ready_name(spec.path):  # a person's function is called in child processes alone
            yield from _known_answers(function, index)
    try:
        labels(functions)
    except ValueError as error:
        yield str(error)
    if cfg.reward.overlong_buffer.enable and any(ready_name(spec.path) == "overlong" for spec in functions):
        yield (
            "`reward.functions` has `overlong`, and `reward.overlong_buffer.enable` (true) punishes the same tokens "
            "once more; drop one of the two"
        )


def _known_answers(function: LoadedFunction, index: int) -> Iterator[str]:
    """Calls a function on its known answers: kwargs that do not go together show only then."""
    try:
        for canary in function.canaries:
            function.call(
                data_source="canary",
                solution_str=canary.solution_str,
                ground_truth=canary.ground_truth,
                extra_info=canary.extra_info,
                **function.kwargs,
            )
    except ValueError as error:
        yield f"`reward.functions[{index}].kwargs` ({redacted(function.kwargs)}): {error}"


def _torchvision() -> Iterator[str]:
    """Reports a torchvision built for CUDA next to a CPU torch, which breaks `import transformers` with a riddle about
    nms."""
    try:
        vision = importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return
    torch_version = importlib.metadata.version("torch")
    if "+cpu" in torch_version and "+cpu" not in vision:
        yield (
            f"torchvision {vision} is built for CUDA, but torch is {torch_version}; dapo needs no torchvision: "
            "run `pip uninstall torchvision`"
        )
