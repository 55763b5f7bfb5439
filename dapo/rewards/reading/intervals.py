"""Writes inequalities in one letter as intervals: x < 1 or x >= 2 becomes (-\\infty,1)\\cup[2,\\infty). math-verify
compares the two only if the ground truth is a single inequality."""

import re

from dapo.rewards.reading.spelling import formula, unwrapped

_OR = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])")
_NAMES = {"<=": r"\\leq?(?![A-Za-z])|\u2264|\\leqslant", ">=": r"\\geq?(?![A-Za-z])|\u2265|\\geqslant"}
_NAMES |= {"<": r"\\lt(?![A-Za-z])", ">": r"\\gt(?![A-Za-z])"}
_SIGN = re.compile(r"([<>]=?)")
_LETTER = re.compile(r"[A-Za-z]")
_NO_VALUE = re.compile(r"[=,;()\[\]]|^\s*$|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
# Intervals, but (1,2) may be a point.
_INTERVAL = r"(?:\\left ?)?[(\[][^()\[\],]+,[^()\[\],]+(?:\\right ?)?[)\]]"
_SET = re.compile(rf"{_INTERVAL}(?:\s*\\cup\s*{_INTERVAL})*")


def is_of_intervals(latex: str) -> bool:
    """Whether an expression is an interval, or several joined by \\cup, and cannot be a point or vector."""
    return bool(_SET.fullmatch(latex)) and any(mark in latex for mark in ("\\infty", "\\cup", "[", "]"))


def as_intervals(text: str) -> str:
    """Returns inequalities joined by `or` as intervals; "" for anything else."""
    text = unwrapped(formula(text, right_side=False)).replace("$", " ").rstrip(" .")
    for sign, names in _NAMES.items():
        text = re.sub(names, sign, text)
    found = [_interval(part) for part in _OR.split(text)]
    letters = {letter for letter, _ in found}
    return "\\cup".join(interval for _, interval in found) if len(letters) == 1 and "" not in letters else ""


def _interval(inequality: str) -> tuple[str, str]:
    parts = [part.strip() for part in _SIGN.split(inequality)]
    places = [place for place in range(0, len(parts), 2) if _LETTER.fullmatch(parts[place])]
    if len(parts) not in (3, 5) or len(places) != 1 or (len(parts) == 5 and places != [2]):
        return "", ""
    letter, signs = parts[places[0]], parts[1::2]
    values = [part for place, part in enumerate(parts[::2]) if 2 * place != places[0]]
    if any(map(_NO_VALUE.search, values)) or len({sign[0] for sign in signs}) > 1:
        return "", ""
    if signs[0][0] == ">":
        parts, signs, values = parts[::-1], signs[::-1], values[::-1]
    opened, closed = "(["[len(signs[0]) - 1], ")]"[len(signs[-1]) - 1]
    if len(parts) == 5:
        return letter, f"{opened}{values[0]},{values[1]}{closed}"
    if parts[0] == letter:
        return letter, f"(-\\infty,{values[0]}{closed}"
    return letter, f"{opened}{values[0]},\\infty)"
