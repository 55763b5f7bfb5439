"""Named terms in bytes, each with its formula, and number formatting."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One summand. formula: its arithmetic as text."""

    name: str
    amount: float
    formula: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Contents of one device's memory at the peak of a phase; amounts in bytes."""

    name: str
    terms: tuple[Term, ...]

    @property
    def total(self) -> float:
        return together(self.terms)


def together(terms: Iterable[Term]) -> float:
    return sum(term.amount for term in terms)


def product(name: str, width: int, *counts: int) -> Term:
    formula = " x ".join([f"{width:,} B", *(f"{n:,}" for n in counts)])
    return Term(name=name, amount=width * math.prod(counts), formula=formula)


def short(amount: float, unit: str = "") -> str:
    """Formats a number with a unit prefix: 3.28 T."""
    for factor, letter in UNITS:
        if abs(amount) >= factor:
            return f"{amount / factor:.2f} {letter}{unit}"
    return f"{amount:.0f} {unit}".rstrip()


def size(amount: float) -> str:
    return short(amount, "B")


def duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 600 else f"{seconds:.1f} s"


def table(terms: Sequence[Term], total: str = "") -> list[str]:
    """Returns one line per non-zero term, and a line with their sum if `total` names it."""
    shown = [term for term in terms if term.amount]
    names = [term.name for term in shown] + [total]
    width = max(len(name) for name in names)
    lines = [f"  {term.name:<{width}}  {size(term.amount):>10}  {term.formula}".rstrip() for term in shown]
    if total:
        lines.append(f"  {total:<{width}}  {size(together(terms)):>10}")
    return lines
