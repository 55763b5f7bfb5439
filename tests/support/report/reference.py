"""Reads the reference of all metrics, dapo/report/README.md: their names, and which files make them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).resolve().parents[3] / "dapo/report/README.md"
PLACEHOLDER = re.compile(r"\{\w+\}")


@dataclass(frozen=True, slots=True)
class Family:
    """The metrics of one table. files: that make them. names: whole ones, braces for what a person named."""

    prefix: str
    files: tuple[str, ...]
    names: tuple[str, ...]


def read(text: str) -> list[Family]:
    found = []
    for section in text.split("\n### `")[1:]:
        prefix, _, rest = section.partition("/`: ")
        [made] = re.findall(r"^Made in (.+)\.$", rest, re.MULTILINE)
        rows = re.findall(r"^\| `([^`]+)` \| .* \| .+ \| .* \|$", rest, re.MULTILINE)
        assert len(rows) == sum(line.startswith("|") for line in rest.splitlines()) - 2, f"a row of `{prefix}/`"
        names = tuple(f"{prefix}/{name}" for name in rows)
        found.append(Family(prefix, tuple(re.findall(r"[\w/]+\.py", made)), names))
    return found


FAMILIES = read(README.read_text(encoding="utf-8"))
NAMES = [name for family in FAMILIES for name in family.names]
HISTOGRAMS = re.findall(r"^- `(\w+/\w+)`: ", README.read_text(encoding="utf-8").rpartition("\n### ")[2], re.MULTILINE)


def _pattern(name: str) -> str:
    return "".join(".+" if PLACEHOLDER.fullmatch(part) else re.escape(part) for part in re.split(r"(\{\w+\})", name))


KNOWN = re.compile("|".join(map(_pattern, NAMES)))


def undocumented(names: Iterable[str]) -> list[str]:
    """Those of the names of a metrics.jsonl that the reference does not have."""
    return sorted(name for name in set(names) - {"step"} if not KNOWN.fullmatch(name))
