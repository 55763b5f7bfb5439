"""Random solutions whose ground truths are numbers: honest answers in every dress, guesses, sums, lists and soup."""

import random
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate

DRESSES = (
    *(
        "{0}",
        "{0}",
        "{0}",
        " {0} ",
        "${0}$",
        "$ {0} $",
        "\\({0}\\)",
        "\\[{0}\\]",
        "**{0}**",
        "({0})",
        "$({0})$",
        "[{0}]",
    ),
    *(
        "\\boxed{{{0}}}",
        "$\\boxed{{{0}}}$",
        "\\text{{{0}}}",
        "\\textnormal{{{0}}}",
        "\\left({0}\\right)",
        "\\{{{0}\\}}",
    ),
    *(
        "{0} dollars",
        "{0} cm",
        "{0}\\text{{ cm}}",
        "{0}\\textnormal{{ miles}}",
        "{0}^\\circ",
        "{0}\\%",
        "{0}%",
        "\\${0}",
    ),
    *("x = {0}", "$x = {0}$", "n = 2 + 3 = {0}", "x = ({0})", "\\frac{{{0}}}{{1}}", "{0}x", "x + {0}", "{0}.", "{0},"),
    *("-{0}", "-({0})", "+{0}", "{0}+1", "1+{0}", "{0}-{1}", "{0} \\times {1}", "{0}\\cdot 1", "{0}^2", "{0}^{{1}}"),
    *(
        "\\sqrt{{{0}}}",
        "|{0}|",
        "{0}!",
        "{0}/1",
        "{0}/{1}",
        "\\frac{{{0}}}{{{1}}}",
        "{1}\\frac{{1}}{{2}}",
        "{0} \\frac12",
    ),
    *("{0} or {1}", "{1} or {0}", "{0} and {1}", "{0}, {1}", "{1}, {0}", "{0}; {1}", "{0} {1}", "{0}{1}", "{1}{0}"),
    *("$ {0} $ $ {1} $", "${1}$, ${0}$", "${1}$ or ${0}$", "({1}), ({0})", "x = {1}, x = {0}", "x = ({1}), y = ({0})"),
    *("x = {1} or x = {0}", "({0}, {1})", "({1},{0})", "[{1},{0}]", "{1} \\quad {0}", "{1} \\text{{ or }} {0}"),
    *("{0} \\times 10^{{{2}}}", "{0} \\times 10^{2}", "{0} \\cdot 10^{2}", "10^{2}", "{0}e{2}", "({0} \\times 10^{2})"),
    *("\\boxed{{{1}}}. Wait, that is wrong: \\boxed{{{0}}}", "\\boxed{{{0}}}. Wait, no: \\boxed{{{1}}}"),
    *("\\boxed{{{1}}} or \\boxed{{{0}}}", "\\boxed{{{1}}}, \\boxed{{{0}}}", "\\boxed{{{1}}} \\boxed{{{0}}}"),
    *("{1} or \\boxed{{{0}}}", "\\boxed{{{0}}} or {1}", "{1}, \\boxed{{{0}}}", "{1}\\boxed{{{0}}}", "1+\\boxed{{{0}}}"),
    *(
        "{0} million",
        "{0} thousand",
        "not {0}",
        "about {0}",
        "{0} < {1}",
        "x > {0}",
        "{1} = {0}",
        "{0} = {1}",
        "{0} \\pm {1}",
    ),
)
FRAMES = (
    "Answer: {}",
    "So.\nAnswer: {}\n",
    "Answer: {}\nThat is all.",
    "\\boxed{{{}}}",
    "It is $\\boxed{{{}}}$.",
    "Hence {}",
)
PIECES = (
    *(
        "$",
        "\\$",
        "x",
        " ",
        " ",
        "cm",
        "hours",
        ".",
        ",",
        "\\!",
        ",\\!",
        "\\,",
        "-",
        "+",
        "/",
        "%",
        "**",
        "^2",
        "10",
        "1",
    ),
    *(
        "0",
        "2",
        "or",
        "and",
        ";",
        "\\times",
        "\\cdot",
        "\\circ",
        "\\%",
        "<",
        "\\le",
        "e",
        "\\pm",
        "\\pi",
        "\u0664",
        ":",
        "|",
    ),
)
PAIRS = (
    *(("\\boxed{", "}"), ("\\boxed{", "}"), ("\\text{", "}"), ("{", "}"), ("(", ")"), ("[", "]"), ("$", "$")),
    *(("\\sqrt{", "}"), ("\\frac{", "}{2}"), ("\\(", "\\)"), ("\\{", "\\}"), ("2^{", "}"), ("**", "**")),
)


def number_pairs(seed: int, count: int) -> Iterator[tuple[str, str, str, Fraction]]:
    """Yields a solution, the text of its answer, the ground truth, and its value."""
    chance = random.Random(seed)
    for _ in range(count):
        value = _number(chance)
        other = value + chance.choice((-1, 1, 2, 10, Fraction(1, 2))) if chance.random() < 0.8 else _number(chance)
        power = chance.randrange(-3, 5)
        dressed = value / Fraction(10) ** power if chance.random() < 0.2 else value
        text = _spelled(chance, dressed if chance.random() < 0.8 else other)
        for _ in range(chance.choice((1, 1, 1, 2, 2, 3))):
            text = chance.choice(DRESSES).format(text, _spelled(chance, other), power)
        for _ in range(chance.choice((0, 0, 1, 1, 2))):
            text = _soup(chance, text)
        yield chance.choice(FRAMES).format(text), text, _truth(chance, value), value


def _soup(chance: random.Random, text: str) -> str:
    """A piece somewhere, or brackets or a command around a part that begins and ends with whole numbers; nothing that
    takes a word or a command apart."""
    places = [at for at in range(len(text) + 1) if not re.search(r"[A-Za-z\\]$", text[:at])]
    if chance.random() < 0.5:
        place = chance.choice(places)
        return text[:place] + chance.choice(PIECES) + text[place:]
    ends = [at for at in places if not re.search(r"[0-9.,]$", text[:at]) or not re.match(r"[0-9.,]", text[at:])]
    first, last = sorted(chance.choices(ends, k=2))
    part = text[first:last]
    if not re.search("[0-9]", part) or not _is_closed(part) or part.count("$") % 2:
        return text
    left, right = chance.choice(PAIRS)
    return text[:first] + left + part + right + text[last:]


def _is_closed(part: str) -> bool:
    depths = list(accumulate({"{": 1, "}": -1}.get(char, 0) for char in part))
    return min(depths) >= 0 and depths[-1] == 0


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
