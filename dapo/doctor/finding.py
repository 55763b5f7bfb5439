"""Holds what a check has found: a level, what it is with figures, and the remedy."""

from dataclasses import dataclass

OK, WARNING, FAULT = "ok", "warning", "fault"
SKIPPED = "skipped"  # not looked at, because something that it needs has a fault of its own
LEVELS = (SKIPPED, OK, WARNING, FAULT)  # the worst last


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds one line. found: with figures. remedy: what to do, empty where nothing is wrong."""

    level: str
    found: str
    remedy: str = ""


def ok(found: str) -> Finding:
    """Returns that all is well."""
    return Finding(OK, found)


def warning(found: str, remedy: str) -> Finding:
    """Returns what a run survives and a person should know."""
    return Finding(WARNING, found, remedy)


def fault(found: str, remedy: str) -> Finding:
    """Returns what ends a run, or spoils it."""
    return Finding(FAULT, found, remedy)


def worst(levels: list[str]) -> str:
    """Returns the worst of some levels."""
    return max(levels, key=LEVELS.index)
