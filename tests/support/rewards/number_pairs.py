"""Random solutions whose ground truths are numbers: honest answers in every dress, guesses, sums, lists and soup."""

import random
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

from tests.support.rewards.tables import meant, rows

_ROWS = rows(Path(__file__).resolve().parents[2] / "rewards/number_pairs.tsv")
_PAIRS = [(left, right) for left, right, *kind in _ROWS if kind]


def parts(kind: str) -> list[str]:
    """The texts of a kind in `number_pairs.tsv`."""
    return [meant(row[0]) for row in _ROWS if row[-1] == kind]


def number_pairs(seed: int, count: int, *, usual: bool = False) -> Iterator[tuple[str, str, str, Fraction]]:
    """Yields a solution, the text of its answer, the ground truth, and its value. usual: in one more dress that people
    and models use and the others do not read, Unicode and sentences, and without soup."""
    chance = random.Random(seed)
    dresses, frames, pieces = parts("dress"), parts("frame"), parts("piece")
    if usual:
        frames += parts("usual frame")
    more = parts("usual dress")
    for _ in range(count):
        value = _number(chance)
        other = value + chance.choice((-1, 1, 2, 10, Fraction(1, 2))) if chance.random() < 0.8 else _number(chance)
        power = chance.randrange(-3, 5)
        dressed = value / Fraction(10) ** power if chance.random() < 0.2 else value
        text = _spelled(chance, dressed if chance.random() < 0.8 else other)
        for _ in range(chance.choice((1, 1, 1, 2, 2, 3)) if not usual else chance.choice((0, 1))):
            text = chance.choice(dresses).format(text, _spelled(chance, other), power)
        if usual:
            text = chance.choice(more).format(text, _spelled(chance, other), power)
        for _ in range(0 if usual else chance.choice((0, 0, 1, 1, 2))):
            text = _soup(chance, text, pieces)
        yield chance.choice(frames).format(text), text, _truth(chance, value), value


def _soup(chance: random.Random, text: str, pieces: list[str]) -> str:
    """A piece somewhere, or brackets or a command around a part that begins and ends with whole numbers; nothing that
    takes a word or a command apart."""
    places = [at for at in range(len(text) + 1) if not re.search(r"[A-Za-z\\]$", text[:at])]
    if chance.random() < 0.5:
        place = chance.choice(places)
        return text[:place] + chance.choice(pieces) + text[place:]
    ends = [at for at in places if not re.search(r"[0-9.,]$", text[:at]) or not re.match(r"[0-9.,]", text[at:])]
    first, last = sorted(chance.choices(ends, k=2))
    part = text[first:last]
    depths = list(accumulate({"{": 1, "}": -1}.get(char, 0) for char in part))
    if not re.search("[0-9]", part) or min(depths) < 0 or depths[-1] or part.count("$") % 2:
        return text
    left, right = chance.choice(_PAIRS)
    return text[:first] + left + part + right + text[last:]


def _number(chance: random.Random) -> Fraction:
    sign = chance.choice((1, 1, 1, -1))
    top = chance.choice((chance.randrange(10), chance.randrange(1000), chance.randrange(10**7)))
    return sign * Fraction(top, chance.choice((1, 1, 1, 1, 2, 3, 4, 7, 10, 100)))


def _truth(chance: random.Random, value: Fraction) -> str:
    """A number as data sets write it."""
    if value.denominator == 1:
        return chance.choice((f"{value.numerator}", f"{value.numerator}", f"{value.numerator:,}"))
    sign, top, bottom = "-" * (value < 0), abs(value.numerator), value.denominator
    if Fraction(10**6) % bottom == 0 and chance.random() < 0.5:
        return sign + f"{top / bottom:f}".rstrip("0")
    return chance.choice((f"{sign}{top}/{bottom}", f"{sign}\\frac{{{top}}}{{{bottom}}}"))


def _spelled(chance: random.Random, value: Fraction) -> str:
    """A number in one of its spellings."""
    sign, top, bottom = "-" * (value < 0), abs(value.numerator), value.denominator
    if bottom == 1:
        text = str(top)
        if top >= 1000 and chance.random() < 0.4:
            joint = chance.choice((",", "{,}", "\\,", " ", ",\\!", ",\\! "))
            text = f"{top:,}".replace(",", joint)
        return sign + chance.choice((text, text, text, text, "0" + text, text + ".0"))
    spellings = [f"{sign}{top}/{bottom}", f"{sign}\\frac{{{top}}}{{{bottom}}}", f"\\frac{{{sign}{top}}}{{{bottom}}}"]
    if top > bottom:
        spellings.append(f"{sign}{top // bottom}\\frac{{{top % bottom}}}{{{bottom}}}")
    if Fraction(10**6) % bottom == 0:
        spellings += [sign + f"{top / bottom:f}".rstrip("0")] * 3
    return chance.choice(spellings)
