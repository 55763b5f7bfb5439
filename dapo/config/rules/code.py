"""Checks of the `code` reward and its sandbox."""

from collections.abc import Iterator

from dapo.config.names import nearest
from dapo.config.reward import RewardFunctionConfig
from dapo.config.schema import Config

PATHS = ("code", "dapo.rewards.code")
OPTIONS = {"partial": "true or false", "max_tests": "a whole number, 0 for all tests"}


def code(cfg: Config) -> Iterator[str]:
    entries = [(index, spec) for index, spec in enumerate(cfg.reward.functions) if spec.path in PATHS]
    for index, spec in entries:
        yield from _options(f"reward.functions[{index}]", spec)
    if entries:
        yield from _times(cfg)


def _options(key: str, spec: RewardFunctionConfig) -> Iterator[str]:
    for name, value in spec.kwargs.items():
        if name not in OPTIONS:
            yield f"`{key}.kwargs.{name}` is no option of `code`; {nearest(name, OPTIONS)}".rstrip("; ")
        elif name == "partial" and not isinstance(value, bool):
            yield f"`{key}.kwargs.partial` ({value}) must be {OPTIONS[name]}"
        elif name == "max_tests" and (type(value) is not int or value < 0):
            yield f"`{key}.kwargs.max_tests` ({value}) must be {OPTIONS[name]}"


def _times(cfg: Config) -> Iterator[str]:
    limits, sandbox = cfg.reward.limits, cfg.reward.limits.sandbox
    if not sandbox.cpu_s <= sandbox.wall_s <= sandbox.total_s:
        yield (
            f"`reward.limits.sandbox.cpu_s` ({sandbox.cpu_s:g}) must be at most `reward.limits.sandbox.wall_s` "
            f"({sandbox.wall_s:g}), and that at most `reward.limits.sandbox.total_s` ({sandbox.total_s:g}), the time "
            "of all tests of one response; raise the latter"
        )
    if 2 * sandbox.total_s > limits.wall_s:
        yield (
            f"`reward.limits.wall_s` ({limits.wall_s:g}) must be at least twice `reward.limits.sandbox.total_s` "
            f"({sandbox.total_s:g}), or a response is given up before its tests have had their time; raise the one "
            "(and `reward.timeout_s`) or lower the other"
        )
