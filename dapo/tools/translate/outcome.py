"""What becomes of each field of another system's run.

fields given ─▶ a rule, else a key of the same meaning, else what happens instead ─▶ keys of dapo, a line per field
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from dapo.config import fields
from dapo.config.algorithm import CLIP, POLICY_LOSSES
from dapo.config.elsewhere import TRL, VERL, Refused, said_of
from dapo.config.names import OPEN, elsewhere
from dapo.config.schema import Config
from dapo.tools.translate.shell import first_unknown

UNACCOUNTED, REFUSED, TRANSLATED, INSTEAD, SAME = KINDS = (
    "unaccounted",
    "refused",
    "translated",
    "no counterpart",
    "same",
)
OFF: tuple[Any, ...] = (None, False, "", 0, -1, [], {}, "null", "none")


@dataclass(frozen=True, slots=True)
class Outcome:
    """kind: one of KINDS. said: how it is translated, what happens instead, why it is refused. sets: keys of dapo."""

    kind: str
    said: str = ""
    sets: Mapping[str, Any] = field(default_factory=dict)


def translated(said: str, sets: Mapping[str, Any]) -> Outcome:
    return Outcome(TRANSLATED, said, sets)


def instead(said: str) -> Outcome:
    return Outcome(INSTEAD, said)


def refused(said: str) -> Outcome:
    return Outcome(REFUSED, said)


def same(key: str, value: Any) -> Outcome:
    return Outcome(SAME, f"`{key}`", {key: value})


@dataclass(frozen=True, slots=True)
class Run:
    """A run of another system. given: fields by name. defaults: the system's own values of fields that matter."""

    system: str
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def get(self, *names: str) -> Any:
        """Returns the value of the first of these fields that is given, else the default of the first."""
        return next((self.given[name] for name in names if name in self.given), self.defaults.get(names[0]))


Rules = Mapping[str, Callable[[Run, Any], Outcome]]


@dataclass(frozen=True, slots=True)
class Line:
    field: str
    value: Any
    outcome: Outcome
    given: bool


def translate(run: Run, rules: Rules) -> tuple[dict[str, Any], list[Line]]:
    """Returns the keys of dapo, and a line for each field that is given or whose default of the other system counts."""
    sets: dict[str, Any] = {}
    lines: list[Line] = []
    usual = defaults()
    for name, value in run.given.items():
        outcome = _outcome(run, name, value, rules)
        for key in [key for key, one in outcome.sets.items() if key in sets and sets[key] != one]:
            outcome = dataclasses.replace(
                outcome, kind=REFUSED, said=f"another field makes `{key}` {sets[key]}, which is kept", sets={}
            )
        sets |= outcome.sets
        lines.append(Line(name, value, outcome, given=True))
    for name, value in run.defaults.items():
        if name not in run.given:
            outcome = _outcome(run, name, value, rules)
            new = {key: one for key, one in outcome.sets.items() if key not in sets and usual.get(key, "") != one}
            sets |= new
            if new or outcome.kind in (UNACCOUNTED, REFUSED):
                lines.append(Line(name, value, dataclasses.replace(outcome, sets=new), given=False))
    return _of_the_loss(sets, lines)


def _outcome(run: Run, name: str, value: Any, rules: Rules) -> Outcome:
    rule = next((rule for pattern, rule in rules.items() if fnmatchcase(name, pattern)), None)
    ours = list(dict.fromkeys(key for system, key in elsewhere().get(name, ()) if system == run.system))
    if rule or len(ours) == 1:
        if missing := first_unknown(value):
            return refused(f"`{missing}` is not known without running it; give its value")
        if rule:
            try:
                outcome = rule(run, value)
            except (TypeError, ValueError):  # arithmetic with other fields
                return refused("it, or a field that counts with it, is not known or no number")
            missing = first_unknown(dict(outcome.sets))
            return refused(f"`{missing}` is not known without running it") if missing else outcome
        if value is None:
            return instead(f"no value: `{ours[0]}` keeps dapo's default")
        if typing.get_origin(_kinds().get(ours[0])) is list and not isinstance(value, list):
            return translated(f"a list, `{ours[0]}`", {ours[0]: [value]})
        return same(ours[0], value)
    for system, mapping, rest in _inside(name):
        if system == run.system:
            return (
                refused(f"`{first_unknown(value)}` is not known")
                if first_unknown(value)
                else same(f"{mapping}.{rest.replace('-', '_')}", value)
            )
    if said := said_of(name, VERL if run.system == "verl" else TRL):
        if isinstance(said, Refused) and value not in OFF:
            return refused(said)
        return instead("off, here too" if isinstance(said, Refused) else said.removesuffix("leave it out").rstrip("; "))
    return Outcome(UNACCOUNTED, "dapo.translate does not know it")


def _inside(name: str) -> list[tuple[str, str, str]]:
    """Returns system, our mapping and key in it, of a field inside a mapping that both pass on to a library."""
    found = []
    for at in [at for at, letter in enumerate(name) if letter == "."]:
        found += [(system, key, name[at + 1 :]) for system, key in elsewhere().get(name[:at], ()) if key in OPEN]
    return found


def _of_the_loss(sets: dict[str, Any], lines: list[Line]) -> tuple[dict[str, Any], list[Line]]:
    """Leaves out parameters of losses other than the one that trains."""
    loss = sets.get("algorithm.policy_loss", "clip")
    mine = POLICY_LOSSES[loss].keys if loss in POLICY_LOSSES else CLIP
    others = {f"algorithm.{name}" for each in POLICY_LOSSES.values() for name in each.keys if name not in mine}
    kept = {key: value for key, value in sets.items() if key not in others}
    found = []
    for line in lines:
        if line.outcome.sets and not {*line.outcome.sets} & {*kept}:
            if not line.given:
                continue
            line = dataclasses.replace(line, outcome=instead(f"the loss `{loss}` does not read it"))
        found.append(line)
    return kept, found


@cache
def _kinds() -> dict[str, Any]:
    return {one.name: one.kind for one in fields.keys(Config)}


@cache
def defaults() -> dict[str, Any]:
    return {one.name: one.default for one in fields.keys(Config)}


def known(names: Mapping[str, Any]) -> list[str]:
    """Returns the keys that dapo does not have, for tests of the rules."""
    return [name for name in names if name not in _kinds() and not name.startswith(tuple(f"{each}." for each in OPEN))]
