"""Makes a checked `Config` from command-line overrides with Hydra's compose API (the entry point uses `hydra.main`).

Overrides are checked before Hydra sees them: Hydra reports an unknown key without the nearest valid one, and with a
traceback.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import logging
import re
import shlex
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dapo.config.checks import validate
from dapo.config.fields import ITEM, TYPES, keys
from dapo.config.names import OPEN, experiments, hint, is_open, known_keys, meant, nearest
from dapo.config.paths import config_dir
from dapo.config.plan import PlannedConfig
from dapo.config.reward import RewardFunctionConfig
from dapo.config.run_name import named
from dapo.config.sampling import SourceConfig
from dapo.config.schema import Config

FLAGS = (  # Hydra's; argparse also accepts their prefixes
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"),
)
WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
OWN_CONFIGS = ("--config-dir", "-cd", "--config-path", "-cp")  # with these, experiments are user-defined
_PARTS = re.compile(r"""("[^"]*"|'[^']*'|:\s+|\s+|[\[\]{},"'])|((?:[^\[\]{},"':\s]|:(?!\s)|\s+(?![\s\[\]{},"']))+)""")
_ODD = re.compile(r"[^\w\s./:$%+@?|-]", re.ASCII)  # characters that need quotes
REPLACED = ("data.val_files",)  # a list or a mapping; OmegaConf cannot merge one into the other
EXAMPLES: dict[Any, str] = {  # items of lists, and mappings by their keys
    "logging.wandb": "logging.wandb.project=NAME",
    "logging.mlflow": "logging.mlflow.tracking_uri=URL",
    RewardFunctionConfig: "{path: my_reward.py}",
    SourceConfig: "{name: mine, files: [mine.parquet]}",
}
SWITCHED_ON = {"logging.wandb": "{project: dapo}", "logging.mlflow": "{experiment: dapo}"}  # what `true` means

log = logging.getLogger(__name__)

# Experiments may contain the `plan` section; `to_config` removes it for a run.
ConfigStore.instance().store(name="dapo_schema", node=PlannedConfig)


def compose(
    overrides: Sequence[str], experiment: str | None = None, *, plan: bool = False, trains: bool = True
) -> Config:
    """Returns the checked configuration for these overrides, with `+experiment=EXPERIMENT` first.

    plan: return a `PlannedConfig`; overrides may then set `plan` keys. trains: as for `dapo.config.checks.validate`.
    Raises ValueError as `checked_overrides` and `to_config` do, and where Hydra refuses a value.
    """
    chosen = [] if experiment is None else [f"+experiment={experiment}"]
    checked = checked_overrides([*chosen, *overrides], plan=plan)
    return to_config(named(_composed(checked), checked), plan=plan, trains=trains)


def _composed(overrides: list[str]) -> DictConfig:
    """Composes the overrides. Overrides that only replace values go into a copy of the cached experiment tree, ten
    times faster than composing with Hydra. Raises ValueError with Hydra's message where it refuses one."""
    chosen = tuple(override for override in overrides if override.startswith("+experiment="))
    parsed = OverridesParser.create().parse_overrides([one for one in overrides if one not in chosen])
    if not all(_replaces(override) for override in parsed):
        return _by_hydra(overrides)
    tree = copy.deepcopy(_experiment(chosen))
    try:
        for override in parsed:
            name = override.key_or_group
            OmegaConf.update(tree, name, override.value(), merge=True, force_add=override.is_force_add())
    except OmegaConfBaseException:
        return _by_hydra(overrides)
    return tree


def _replaces(override: Override) -> bool:
    """Whether an override only changes a value: not which files are composed, nor which keys exist."""
    name, kind = override.key_or_group, override.type
    known = override.package is None and (name in known_keys(plan=True) or is_open(name))
    return known and kind in (OverrideType.CHANGE, OverrideType.FORCE_ADD) and not override.is_sweep_override()


@functools.cache
def _experiment(chosen: tuple[str, ...]) -> DictConfig:
    """The result is cached; callers must copy it."""
    return _by_hydra(list(chosen))


def _by_hydra(overrides: list[str]) -> DictConfig:
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
            return hydra.compose("dapo", overrides=overrides)
    except HydraException as error:
        raise ValueError(f"{error} ({error.__cause__})" if error.__cause__ else str(error)) from error


def to_config(tree: DictConfig, *, plan: bool = False, trains: bool = True) -> Config:
    """Returns the typed, checked configuration. Raises ValueError as `typed` does, and for what `dapo.config.checks`
    refuses."""
    cfg = typed(tree, plan=plan)
    validate(cfg, trains=trains)
    return cfg


def typed(tree: DictConfig, *, plan: bool = False) -> Config:
    """Returns the typed configuration. Raises ValueError where a value is missing or has the wrong type."""
    if tree.data.sources and "data.train_files[0]" in OmegaConf.missing_keys(tree):
        tree.data.train_files = []
    try:
        cfg: Any = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        if missing := sorted(OmegaConf.missing_keys(tree)):
            names = ", ".join(f"`{key}`" for key in missing)
            raise ValueError(f"no value for {names}; give one, or take a +experiment=NAME") from None
        raise ValueError(f"configuration: {error}") from error
    made: Config = cfg
    return made if plan else Config(**{one.name: getattr(cfg, one.name) for one in dataclasses.fields(Config)})


def half_flags(arguments: Iterable[str]) -> list[str]:
    """Replaces `--rollout-only` and `--train-only=FOLDER` by the keys that they stand for.

    >>> half_flags(["--train-only=run/batches", "trainer.seed=1"])
    ['trainer.only=train', 'data.batches=run/batches', 'trainer.seed=1']
    """
    found: list[str] = []
    for argument in arguments:
        flag, _, folder = argument.partition("=")
        if argument == "--rollout-only":
            found.append("trainer.only=rollout")
        elif flag == "--train-only":
            found += ["trainer.only=train", f"data.batches={folder}"]
        else:
            found.append(argument)
    return found


def checked_overrides(arguments: Sequence[str], *, plan: bool = False) -> list[str]:
    """Returns the arguments for Hydra. Adds the `++` that Hydra requires for a new key such as an engine argument, and
    replaces the flags of `half_flags`. What can only mean one thing (`_as_meant`) is taken as that; a line says so.
    Raises ValueError for unknown experiments and keys (with the nearest existing name), values of a wrong type, and
    more than one experiment."""
    own_configs = any(argument.startswith(OWN_CONFIGS) for argument in arguments)
    arguments = half_flags(arguments if own_configs else map(_experiment_named, arguments))
    many = any(argument in ("-m", "--multirun") for argument in arguments)
    tree = copy.deepcopy(_schema())
    parser = OverridesParser.create()
    checked: list[str] = []
    problems: list[str] = []
    overrides: list[str] = []
    chosen: list[str] = []
    before = ""
    for argument in arguments:
        flag, before = before, argument
        if argument.startswith("-"):
            problems += _not_a_flag(argument, plan)
        elif flag not in WITH_VALUE:
            try:
                override = parser.parse_override(argument)
            except HydraException as error:
                problems.append(_unreadable(argument, error, plan))
                continue
            if (as_meant := _as_meant(override, plan)) != argument:
                log.warning("`%s` is taken as `%s`", argument, as_meant)
                argument, override = as_meant, parser.parse_override(as_meant)
            argument = _for_hydra(argument, override)
            overrides.append(argument)
            if override.key_or_group in REPLACED and not override.is_delete():
                checked.append(f"{override.key_or_group}=null")
                OmegaConf.update(tree, override.key_or_group, None)
            if override.key_or_group == "experiment":
                chosen.append(f"`{argument}`")
                problems += [] if own_configs else _unknown_experiment(str(override.value()))
            elif not override.key_or_group.startswith("hydra"):
                problems += _problems(override, tree, plan=plan, many=many)
        checked.append(argument)
    if len(chosen) > 1:
        problems.append(
            f"{' and '.join(chosen)}: a run takes one experiment; give one, and what you want of another as KEY=VALUE "
            "(their keys are in config/experiment)"
        )
    if problems:
        raise ValueError("\n".join(problems))
    if not own_configs and any(override.startswith("~") for override in overrides):
        _composed(overrides)  # only Hydra knows whether the experiment has the key to remove
    return _at_one_place(checked)


def _experiment_named(argument: str) -> str:
    """Replaces NAME and experiment=NAME by +experiment=NAME, for an experiment that exists.

    >>> _experiment_named("ablation/grpo")
    '+experiment=ablation/grpo'
    """
    name = argument.removeprefix("experiment=")
    return f"+experiment={name}" if name in experiments() else argument


def _as_meant(override: Override, plan: bool) -> str:
    """Returns the override with a value for a list as its only item, `true` for a sink as the sink with its defaults,
    and the only key of that name for an unknown one of its section. All others are returned unchanged."""
    argument, name = str(override.input_line), override.key_or_group
    key, _, text = argument.partition("=")
    if override.type not in (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD):
        return argument
    if override.is_sweep_override() or override.package is not None:
        return argument
    if name not in known_keys(plan) and not is_open(name) and (one := meant(name, plan)):
        key, name = key.replace(name, one), one
    value, kind = override.value(), _kinds().get(name)
    of = typing.get_args(kind) if typing.get_origin(kind) is list else (str,) if name in REPLACED else ()
    if RewardFunctionConfig in of and isinstance(value, list) and value and all(isinstance(x, str) for x in value):
        text = f"[{', '.join(f'{{path: {json.dumps(path, ensure_ascii=False)}}}' for path in value)}]"
    elif RewardFunctionConfig in of and value and isinstance(value, str):
        text = f"[{{path: {text}}}]"
    elif str in of and value and isinstance(value, str):
        text = f"[{text}]"
    elif name in SWITCHED_ON and isinstance(value, bool):
        text = SWITCHED_ON[name] if value else "{}"
    return f"{key}={text}"


def _at_one_place(arguments: Sequence[str]) -> list[str]:
    """Moves all overrides to the position of the first: argparse does not accept them at several positions."""
    parts: tuple[list[str], ...] = ([], [], [])
    before = ""
    for argument in arguments:
        flag = argument.startswith("-") or before in WITH_VALUE
        parts[(2 if parts[1] else 0) if flag else 1].append(argument)
        before = argument
    return [argument for part in parts for argument in part]


def check_shown(arguments: Sequence[str]) -> str:
    """Returns the output directory of a run with the configuration that `--cfg job` prints; raises ValueError where it
    is not valid for one. With any other flag, such as `--config-dir`, nothing is checked. arguments: from
    `checked_overrides`."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    if flags == ["--cfg"] and (at := arguments.index("--cfg")) + 1 < len(arguments):
        overrides = [*arguments[:at], *arguments[at + 2 :]]
        return to_config(named(_composed(overrides), overrides)).trainer.output_dir
    return ""


@functools.cache
def _schema() -> DictConfig:
    """Callers must copy it, which is five times faster than building it."""
    return OmegaConf.structured(PlannedConfig)


def _for_hydra(argument: str, override: Override) -> str:
    """Adds `++` to a key of an open section, and removes `+` from a key that exists."""
    name = override.key_or_group
    if is_open(name) or name in OPEN:
        return argument if override.is_delete() else f"++{argument.lstrip('+')}"
    return argument.lstrip("+") if name in known_keys(plan=True) else argument


def _not_a_flag(argument: str, plan: bool) -> Iterator[str]:
    option, equals, value = argument.partition("=")
    if not argument.startswith("--") or any(flag.startswith(option) for flag in FLAGS):
        return
    name = option[2:].replace("-", "_")
    write = f"write `{name}={value if equals else 'VALUE'}`" if name in known_keys(plan) else hint(name, plan)
    yield f"`{argument}` is not an option: keys take no dashes; {write}"


def _unreadable(argument: str, error: Exception, plan: bool) -> str:
    if "=" not in argument:
        if argument in known_keys(plan):
            return f"`{argument}` lacks a value; write KEY=VALUE"
        near = nearest(argument, [*experiments(), *known_keys(plan)])
        return f"`{argument}` is neither an experiment nor KEY=VALUE; {near or 'write one of them'}"
    return f"cannot read the override `{argument}`: {error}{_quoted(argument)}"


def _quoted(argument: str) -> str:
    """Returns the argument quoted for Hydra and the shell, for the end of a message; empty if quoting does not help."""
    key, _, value = argument.partition("=")
    parts = [mark or (f'"{text}"' if _ODD.search(text) else text) for mark, text in _PARTS.findall(value)]
    for quoted in ("".join(parts), f'"{value}"'):
        with contextlib.suppress(HydraException):
            OverridesParser.create().parse_override(written := f"{key}={quoted}")
            return f"; write {shlex.quote(written)}"
    return ""


def _unknown_experiment(name: str) -> Iterator[str]:
    known = experiments()
    if name not in known:
        near = nearest(name, known, cutoff=0.4)
        yield f"unknown experiment `{name}`; {near}{' ' if near else ''}There are: {', '.join(known)}"


def _problems(override: Override, tree: DictConfig, *, plan: bool, many: bool) -> Iterator[str]:
    """Yields an override's problems. tree: receives the value, like Hydra's tree. many: `--multirun` is given."""
    name = override.key_or_group
    if name not in known_keys(plan) and not is_open(name):
        yield f"unknown key `{name}`; {hint(name, plan)}"
    elif override.is_delete():
        if not is_open(name):
            yield f"`~{name}` would remove a key that a run needs; leave it out, or give {name}=VALUE"
    elif override.is_sweep_override():
        if not many:
            yield (
                f"`{override.input_line}` gives several values; write a list as {name}=[a,b], put text with a comma in "
                "quotes, or add --multirun"
            )
    else:
        yield from _mistyped(name, override.value(), tree)


def _mistyped(name: str, value: Any, tree: Any, above: str = "") -> Iterator[str]:
    """Yields type errors, for each item of mappings and of lists of mappings. above: prefix of `tree`'s keys."""
    try:
        OmegaConf.update(tree, name, value)
        return
    except OmegaConfBaseException as caught:
        error = caught
    shown = f"{above}{name}"
    known = re.sub(r"\[\d+\]", ITEM, shown)
    members = typing.get_args(_kinds().get(known.rpartition(".")[0]))  # type arguments of the mapping that contains it
    kind = _kinds().get(known, members[-1] if members else dict)
    of = next(filter(dataclasses.is_dataclass, typing.get_args(kind)), None)
    if isinstance(value, dict) and known not in _kinds() and known in known_keys(plan=True):
        for key, one in value.items():
            yield from _mistyped(f"{name}.{key}", one, tree, above)
    elif isinstance(value, list) and of is not None:
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                yield f"`{shown}[{index}]` ({_told(item)}) must be a mapping, as in {name}=[{EXAMPLES[of]}]"
                continue
            for key, one in item.items():
                yield from _mistyped(str(key), one, OmegaConf.structured(of), f"{shown}[{index}].")
    elif isinstance(error, ConfigKeyError | ConfigAttributeError):
        yield f"unknown key `{shown}`; {hint(known)}"
    else:
        must = TYPES.get(typing.get_origin(kind) or kind, TYPES[dict])
        if of is not None:
            must = f"a list, such as [{EXAMPLES[of]}]"
        elif known in EXAMPLES:
            must = f"a mapping; name what is in it, as in {EXAMPLES[known]}"
        yield f"`{shown}` ({_told(value)}) must be {must}"


def _told(value: Any) -> str:
    return "null" if value is None else str(value)


@functools.cache
def _kinds() -> dict[str, Any]:
    return {one.name: one.kind for one in keys(PlannedConfig)}
