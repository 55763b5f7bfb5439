"""Suggests the nearest existing name for an unknown one: keys, experiments, other systems' names, vLLM's arguments."""

import ast
import difflib
import functools
import importlib.util
import re
import typing
from collections.abc import Collection, Iterator
from pathlib import Path

from dapo.config.elsewhere import ENGINE_NAMES, instead
from dapo.config.fields import ITEM, keys
from dapo.config.paths import config_dir
from dapo.config.plan import PlanConfig
from dapo.config.schema import Config

ENGINE = "rollout.vllm"
PLAN = "plan"  # section used only by `dapo.plan`
JUDGE = "reward.judge.engine.vllm"
# Mappings that accept any key.
OPEN = tuple(one.name for one in keys(Config) if typing.get_origin(one.kind) is dict and ITEM not in one.name)


@functools.cache
def known_keys(plan: bool = False) -> tuple[str, ...]:
    names = [one.name for one in keys(Config)]
    names += [one.name for one in keys(PlanConfig, f"{PLAN}.")] if plan else []
    parents = {name[: match.start()] for name in names for match in re.finditer(r"\.", name)}
    return (*(parent for parent in sorted(parents) if not parent.endswith(ITEM)), *names)


@functools.cache
def resumes() -> dict[str, str]:
    """Returns what another value of each key does to a run that is resumed (`dapo.config.fields.About`)."""
    return {one.name: one.resume for one in keys(Config)}


def resume_of(name: str) -> str:
    """Returns the same for a key, a section (the gravest of its keys) or a key of an open mapping; `harmless` where a
    run has no such key."""
    known = [kind for key, kind in resumes().items() if f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.")]
    return next((kind for kind in ("meaning", "course") if kind in known), "harmless")


def is_open(name: str) -> bool:
    """Whether `name` lies in a mapping whose keys belong to another library."""
    return name.startswith(tuple(f"{section}." for section in OPEN))


def experiments() -> list[str]:
    folder = config_dir() / "experiment"
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


@functools.cache
def engine_arguments() -> frozenset[str]:
    """Returns the names of vLLM's engine arguments, read from its source, because importing vLLM would take seconds and
    load torch. Empty if it is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py").read_text(encoding="utf-8")
    classes = [one for one in ast.parse(source).body if isinstance(one, ast.ClassDef)]
    lines = [line for one in classes if one.name in ("EngineArgs", "AsyncEngineArgs") for line in one.body]
    targets = [line.target for line in lines if isinstance(line, ast.AnnAssign)]
    return frozenset(target.id for target in targets if isinstance(target, ast.Name))


@functools.cache
def elsewhere() -> dict[str, list[tuple[str, str]]]:
    """Returns, for each name in verl or TRL, pairs of the system and our key."""
    found: dict[str, list[tuple[str, str]]] = {}
    for one in keys(Config):
        for system, names in (("verl", one.about.verl), ("TRL", one.about.trl)):
            for name in names.split(", "):  # an expression (`a / b`) never matches
                if ITEM not in one.name and name:
                    found.setdefault(name, []).append((system, one.name))
    for name, ours in ENGINE_NAMES.items():
        found[name] = [("verl" if "." in name else "TRL", ours)]
    return found


def nearest(name: str, known: Collection[str], cutoff: float = 0.6) -> str:
    """Returns "did you mean ...?" for the nearest of `known`; empty if none is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean `{near[0]}`?" if near else ""


def hint(name: str, plan: bool = False) -> str:
    """Returns what to write instead of the unknown key `name`. plan: as in `known_keys`."""
    return next(filter(None, _hints(name, known_keys(plan))), "config/README.md lists all keys")


def meant(name: str, plan: bool = False) -> str:
    """Returns the only key of the same section with the last part of the unknown key `name` (`actor.optim.lr` for
    `actor.lr`); "" if several have it, a key of another section too, or `name` is another system's."""
    if elsewhere().get(name) or instead(name) or _within(name):
        return ""
    last = name.rpartition(".")[2]
    same = [key for key in known_keys(plan) if ITEM not in key and key.rpartition(".")[2] == last]
    return same[0] if len(same) == 1 and same[0].partition(".")[0] == name.partition(".")[0] else ""


def _within(name: str) -> str:
    """Returns the hint for a key inside a mapping that another system also passes to vLLM."""
    for dot in re.finditer(r"\.", name):
        for system, ours in elsewhere().get(name[: dot.start()], ()):
            if ours in OPEN:
                return f"it is {system}'s name; here it is `{ours}{name[dot.start() :]}`"
    return ""


def _hints(name: str, known: Collection[str]) -> Iterator[str]:
    if name.startswith(f"{PLAN}.") and name in known_keys(plan=True):
        yield "it belongs to `python -m dapo.plan` alone"
    if there := elsewhere().get(name):
        system = there[0][0]
        ours = " or ".join(dict.fromkeys(f"`{key}`" for one, key in there if one == system))
        yield f"it is {system}'s name; here it is {ours}"
    yield _within(name)
    yield instead(name)
    known = [key for key in known if not name.startswith(f"{key}.")]
    first, last = name.partition(".")[0], name.rpartition(".")[2]
    within = [key for key in known if key.partition(".")[0] == first and key.rpartition(".")[2] == last]
    if len(within) == 1:
        yield f"did you mean `{within[0]}`?"
    yield nearest(name, known, cutoff=0.75)
    yield nearest(name, [key for key in known if key.rpartition(".")[2] == last], cutoff=0.0)
    near = difflib.get_close_matches(last.removeprefix("vllm_"), engine_arguments(), n=1, cutoff=0.8)
    if near:
        yield f"did you mean the engine argument `{ENGINE}.{near[0]}`?"
    yield nearest(name, known)
