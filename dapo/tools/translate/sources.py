"""Reads what is to be translated: a shell script, a command line, YAML, or a Python script of TRL."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dapo.config.checks import doubts
from dapo.config.compose import to_config
from dapo.config.schema import Config
from dapo.tools.translate import trl, verl
from dapo.tools.translate.outcome import Line, Run, translate
from dapo.tools.translate.script import TRAINER, fields_of
from dapo.tools.translate.shell import UNKNOWN, Script, unknown

VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
LOST = re.compile(r"[+~]*[a-z]\w*(\.\w+)+=.*", re.DOTALL)  # an argument behind a line without its backslash


@dataclass(slots=True)
class Source:
    """name: for the file's comment. notes: what was not read, as lines of the report."""

    name: str
    run: Run
    notes: list[str]

    def translated(self) -> tuple[str, list[Line], list[str]]:
        """Returns the experiment file, a line per field, and what a run would refuse of the file."""
        rules = verl.RULES if self.run.system == "verl" else trl.RULES
        sets, lines = translate(self.run, rules)
        tree = OmegaConf.create({})
        for key, value in sorted(sets.items()):
            OmegaConf.update(tree, key, value, force_add=True)
        head = f"# @package _global_\n# Translated from {self.run.system} by `python -m dapo.translate`: {self.name}.\n"
        return head + OmegaConf.to_yaml(tree), lines, _problems(tree, self.notes)


def _problems(tree: DictConfig, notes: list[str]) -> list[str]:
    try:
        merged: Any = OmegaConf.merge(OmegaConf.structured(Config), tree)
        notes += [f"doubtful: {doubt}" for doubt in doubts(to_config(merged))]
    except OmegaConfBaseException as error:
        return [" ".join(str(error).split())]
    except ValueError as error:
        return str(error).splitlines()
    return []


def read(arguments: Sequence[str], number: int = 1) -> Source:
    """Returns the run of a file or a command line. number: of its training commands. Raises ValueError."""
    path = Path(arguments[0]).expanduser()
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return _of_yaml(path, arguments[1:])
    if path.suffix == ".py" and path.is_file():
        return _of_script(path, arguments[1:])
    notes: list[str] = []
    if path.is_file():
        variables, rest = {**os.environ}, []
        for argument in arguments[1:]:
            if found := VARIABLE.fullmatch(argument):
                variables[found[1]] = found[2]
            else:
                rest.append(argument)
        script = Script({**variables}, rest).read(path.read_text(encoding="utf-8"))
        commands, notes = script.commands, script.notes
    elif len(arguments) == 1 and not re.search(r"\s", arguments[0]):
        raise ValueError(f"`{arguments[0]}` is neither a file nor a command line; give one of these")
    else:
        commands = [list(arguments)] if len(arguments) > 1 else Script({**os.environ}).read(arguments[0]).commands
    runs = list(_trainings(commands))
    if not runs:
        raise ValueError(
            f"{arguments[0]} starts no training that is known here: a main module of verl, `trl grpo` or a script "
            f"with a {TRAINER}; give the command as it stands"
        )
    if not 1 <= number <= len(runs):
        raise ValueError(f"--command {number}: {arguments[0]} has {len(runs)} training commands")
    if len(runs) > 1:
        notes.append(f"{len(runs)} training commands, of which this is number {number} (--command)")
    system, words, entry = runs[number - 1]
    if system == "verl":
        given = dict(_of_overrides(words, notes))
        given = _with_file(given, path.parent if path.is_file() else Path())
        return Source(path.name if path.is_file() else entry, Run("verl", given, _defaults(entry)), notes)
    return _of_trl_command(entry, words, path.parent if path.is_file() else Path(), notes)


def _defaults(entry: str) -> Mapping[str, Any]:
    if "one_step_off" in entry or "fully_async" in entry:
        stale = 1 if "one_step_off" in entry else 0.1
        apart = {"actor_rollout_ref.hybrid_engine": False, "async_training.staleness_threshold": stale}
        apart |= {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 8}
        if stale == 1:
            return verl.DEFAULTS | apart
        return verl.DEFAULTS | apart | {"async_training.trigger_parameter_sync_step": 4}
    return verl.DEFAULTS


def _trainings(commands: Sequence[Sequence[str]]) -> Iterator[tuple[str, list[str], str]]:
    """Yields system, arguments and entry of each command that trains, with arguments that lost their command."""
    found: list[tuple[str, list[str], str]] = []
    for words in commands:
        for index, word in enumerate(words):
            if any(fnmatchcase(word, pattern) for pattern in verl.ENTRIES):
                found.append(("verl", list(words[index + 1 :]), word))
                break
            if any(fnmatchcase(word, pattern) for pattern in trl.ENTRIES) or _has_config(word):
                found.append(("TRL", list(words[index + 1 :]), word))
                break
        else:
            if found and words and LOST.fullmatch(words[0]):
                found[-1][1].extend(words)
    yield from found


def _has_config(word: str) -> bool:
    path = Path(word)
    return (
        path.suffix == ".py" and path.is_file() and f"{TRAINER}(" in path.read_text(encoding="utf-8", errors="replace")
    )


def _of_overrides(words: Sequence[str], notes: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields fields of Hydra's command line."""
    flag = ""
    for word in words:
        if flag:
            yield flag, word
            flag = ""
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            name = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}.get(name, name)
            if equals or not name.startswith("--config"):
                yield name, value
            else:
                flag = name
        elif "=" in word:
            name, _, value = word.lstrip("+").partition("=")
            yield name, _hydra_value(value)
        elif word.startswith("~"):
            yield word[1:], None
        elif word.strip():
            shown = "".join(letter for letter in word if letter not in UNKNOWN)
            notes.append(f"`{shown}` among the arguments is no KEY=VALUE, and was left out")


def _hydra_value(text: str) -> Any:
    if UNKNOWN[0] in text:
        return text
    try:
        value = OverridesParser.create().parse_override(f"key={text}").value()
    except HydraException:
        return text
    return unknown(text) if "${" in text and "${oc.env:" not in text else _plain(value)


def _plain(value: Any) -> Any:
    """Returns what a text such as "2.0" stands for, where it is a number, a list or nothing else than text."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str) and value != "":
        if re.fullmatch(r"[-+]?\d+", value):
            return int(value)
        if re.fullmatch(r"[-+]?(\d+\.\d*|\.?\d+)([eE][-+]?\d+)?", value):
            return float(value)
        if value[0] in "[{" and value[-1] in "]}":
            try:
                return yaml.safe_load(value)
            except yaml.YAMLError:
                return value
        return {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}.get(
            value, value
        )
    return value


def _of_yaml(path: Path, arguments: Sequence[str]) -> Source:
    try:
        tree = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, DictConfig):
        raise ValueError(f"{path} is no mapping of fields")
    given = dict(_leaves(tree))
    notes: list[str] = []
    if "actor_rollout_ref" in tree:
        return Source(path.name, Run("verl", given | dict(_of_overrides(arguments, notes)), verl.DEFAULTS), notes)
    flat = {
        str(name): OmegaConf.to_container(each) if OmegaConf.is_config(each) else each for name, each in tree.items()
    }
    flat = {name: _plain(value) for name, value in flat.items()}
    return Source(path.name, Run("TRL", flat | trl.options(arguments), trl.DEFAULTS), notes)


def _with_file(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Adds the fields of the file that --config-path and --config-name name, if it is here; those given count."""
    place, name = str(given.get("--config-path", ".")), str(given.get("--config-name")).removesuffix(".yaml")
    file = next((each for each in (Path(place), folder / place) if (each / f"{name}.yaml").is_file()), None)
    if file is None or verl.CONFIG_NAMES.fullmatch(name):
        return given
    tree = OmegaConf.load(file / f"{name}.yaml")
    if not isinstance(tree, DictConfig):
        return given
    tree.pop("defaults", None)
    for key, value in given.items():
        if not key.startswith("-"):
            OmegaConf.update(tree, key, value, force_add=True)
    flags = {key: value for key, value in given.items() if key.startswith("-") and not key.startswith("--config")}
    return flags | dict(_leaves(tree))


def _leaves(tree: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key in tree:
        name = f"{prefix}{key!s}"
        if OmegaConf.is_missing(tree, key):
            yield name, None
            continue
        try:
            value = tree[key]
        except OmegaConfBaseException:
            plain: Any = OmegaConf.to_container(tree, resolve=False)
            yield name, unknown(str(plain.get(key)))
            continue
        if isinstance(value, DictConfig) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, _plain(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)


def _of_script(path: Path, arguments: Sequence[str]) -> Source:
    given, notes = fields_of(path, trl.options(arguments))
    return Source(path.name, Run("TRL", given, trl.DEFAULTS), notes)


def _of_trl_command(entry: str, words: Sequence[str], folder: Path, notes: list[str]) -> Source:
    options = trl.options(words)
    for file in (Path(entry), folder / entry):
        if file.suffix == ".py" and file.is_file():
            found, notes = fields_of(file, options)
            return Source(entry, Run("TRL", found, trl.DEFAULTS), notes)
    given: Mapping[str, Any] = {}
    if config := options.pop("config", None):
        files = [file for file in (Path(config), folder / config) if file.is_file()]
        if not files:
            raise ValueError(f"--config {config}: there is no such file")
        given = _of_yaml(files[0], ()).run.given
    return Source(entry, Run("TRL", {**given, **options}, trl.DEFAULTS), notes)
