"""Keeps arithmetic for people: named terms in bytes, each with its formula, and how numbers are written."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """Holds one summand. formula: the same number from its factors, in words."""

    name: str
    amount: float
    formula: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Lists what lies in one device's memory at the fullest moment of a phase; amounts in bytes."""

    name: str
    terms: tuple[Term, ...]

    @property
    def total(self) -> float:
        """Returns the bytes of all terms."""
        return together(self.terms)


def together(terms: Iterable[Term]) -> float:
    """Returns the bytes of all terms."""
    return sum(term.amount for term in terms)


def product(name: str, width: int, *counts: int) -> Term:
    """Returns the term of `width` bytes times the counts, with that as its formula."""
    return Term(
        name=name, amount=width * math.prod(counts), formula=" x ".join([f"{width} B", *(f"{n:,}" for n in counts)])
    )


def size(amount: float) -> str:
    """Writes bytes for a person, decimal: 14.76 GB."""
    return short(amount, "B")


def short(amount: float, unit: str = "") -> str:
    """Writes a number with three digits or more: 3.28 T."""
    for factor, letter in UNITS:
        if abs(amount) >= factor:
            return f"{amount / factor:.2f} {letter}{unit}"
    return f"{amount:.0f} {unit}".rstrip()


def duration(seconds: float) -> str:
    """Writes 1,234 s as minutes, from ten of them on."""
    return f"{seconds / 60:.1f} min" if seconds >= 600 else f"{seconds:.1f} s"


def table(terms: Sequence[Term], total: str = "") -> list[str]:
    """Returns one line per term that is not zero, and one with their sum under the name `total`."""
    shown = [term for term in terms if term.amount]
    names = [term.name for term in shown] + [total]
    width = max(len(name) for name in names)
    lines = [f"  {term.name:<{width}}  {size(term.amount):>10}  {term.formula}".rstrip() for term in shown]
    if total:
        lines.append(f"  {total:<{width}}  {size(together(terms)):>10}")
    return lines
