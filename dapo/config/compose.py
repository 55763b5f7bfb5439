"""From overrides to a checked `Config`: `compose`, with Hydra's compose API; the entry point lets `hydra.main` compose.

In: the arguments after the program's name. Out: a `Config`, or a ValueError for a person. Overrides are checked before
Hydra sees them, because Hydra names an unknown key but not the one meant.
"""

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dapo.config.checks import validate
from dapo.config.paths import config_dir
from dapo.config.schema import Config

OPEN = "*"  # below this any key is taken: it belongs to vLLM

ConfigStore.instance().store(name="dapo_schema", node=Config)


def compose(overrides: Sequence[str], experiment: str | None = None) -> Config:
    """Returns the checked configuration of a run with these arguments, `+experiment=EXPERIMENT` before them.

    Raises ValueError as `checked_overrides` and `to_config` do, and where Hydra refuses a value.
    """
    chosen = [] if experiment is None else [f"+experiment={experiment}"]
    arguments = checked_overrides([*chosen, *overrides])
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
            tree = hydra.compose("dapo", overrides=arguments)
    except HydraException as error:
        raise ValueError(f"{error} ({error.__cause__})" if error.__cause__ else str(error)) from error
    return to_config(tree)


def to_config(tree: DictConfig) -> Config:
    """Returns the typed configuration, checked.

    Raises ValueError where a value is missing, has the wrong type, or is one that `dapo.config.checks` refuses.
    """
    missing = sorted(OmegaConf.missing_keys(tree))
    if missing:
        raise ValueError(
            f"no value for {', '.join(f'`{key}`' for key in missing)}; give one, or take a +experiment=NAME"
        )
    try:
        cfg: Any = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise ValueError(f"configuration: {error}") from error
    validate(cfg)
    return cfg


def known_keys(section: Any = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the configuration, sections included; `rollout.vllm.*` stands for any engine argument."""
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        key = f"{prefix}{field.name}"
        yield key
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from known_keys(kind, f"{key}.")
        elif typing.get_origin(kind) is dict:
            yield f"{key}.{OPEN}"


def experiments() -> list[str]:
    """Names for `+experiment=`."""
    folder = config_dir() / "experiment"
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


def checked_overrides(arguments: Sequence[str]) -> list[str]:
    """The arguments for Hydra; an engine argument need not carry the `++` that Hydra wants for a new key.

    Raises ValueError for an unknown experiment or key, with the nearest existing name.
    """
    own_configs = any(argument.startswith(("--config-dir", "-cd", "--config-path", "-cp")) for argument in arguments)
    keys = list(known_keys())
    checked = []
    for argument in arguments:
        open_key = any(argument.startswith((key[:-1], f"{key[:-2]}=")) for key in keys if key.endswith(OPEN))
        checked.append(f"++{argument}" if open_key else argument)
        if argument.startswith("-") or "=" not in argument:
            continue
        try:
            override = OverridesParser.create().parse_override(argument)
        except OverrideParseException as error:
            raise ValueError(f"cannot read the override `{argument}`: {error}") from None
        name = override.key_or_group
        if name == "experiment":
            if not own_configs:
                _check_experiment(str(override.value()))
        elif not name.startswith("hydra") and not _is_known(name, keys):
            raise ValueError(f"unknown key `{name}`; {_hint(name, keys)}")
    return checked


def _check_experiment(name: str) -> None:
    known = experiments()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean `{near[0]}`? " if near else ""
        raise ValueError(f"unknown experiment `{name}`; {hint}There are: {', '.join(known)}")


def _is_known(name: str, keys: Sequence[str]) -> bool:
    return name in keys or any(key.endswith(OPEN) and name.startswith(key[:-1]) for key in keys)


def _hint(name: str, keys: Sequence[str]) -> str:
    """The nearest key: by its whole name, else by its last part wherever that lives."""
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.75)
    if not near:
        last = name.rpartition(".")[2]
        near = [key for key in keys if key.rpartition(".")[2] == last] or difflib.get_close_matches(name, keys, n=1)
    return f"did you mean `{near[0]}`?" if near else "`--cfg job` prints all keys"
