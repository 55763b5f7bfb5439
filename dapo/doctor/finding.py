"""The result of a check."""

from dataclasses import dataclass

OK, WARNING, FAULT = "ok", "warning", "fault"
SKIPPED = "skipped"  # not checked, because a check that it needs has failed
LEVELS = (SKIPPED, OK, WARNING, FAULT)  # in increasing severity


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. found: what was found, with numbers. remedy: empty where nothing is wrong."""

    level: str
    found: str
    remedy: str = ""


def ok(found: str) -> Finding:
    return Finding(OK, found)


def warning(found: str, remedy: str) -> Finding:
    """A problem that the run survives."""
    return Finding(WARNING, found, remedy)


def fault(found: str, remedy: str) -> Finding:
    """A problem that ends a run or spoils its results."""
    return Finding(FAULT, found, remedy)


def worst(levels: list[str]) -> str:
    return max(levels, key=LEVELS.index)
