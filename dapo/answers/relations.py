"""Distinguishes equations and inequalities (x + 2y = 0, x >= 2) from named values (m = 5, f(2) = 5). A relation is
compared as a whole, because one side says little: otherwise `0` would be correct for every plane."""

import re

from dapo.answers.spelling import careful_spelling, formula, unwrapped

_INEQUALITY = r"<|>|\\(?:l|g)(?:eq?|t|eqslant)(?![A-Za-z])|\\neq?(?![A-Za-z])"
INEQUALITY = re.compile(_INEQUALITY)
RELATION = re.compile(rf"=|{_INEQUALITY}")
_SAME = {
    **{name: ">=" for name in ("\\ge", "\\geq", "\\geqslant")},
    **{name: "<=" for name in ("\\le", "\\leq", "\\leqslant")},
    **{"\\lt": "<", "\\gt": ">", "\\neq": "\\ne"},
}
_SIGN = re.compile(r"\\(?:(?:l|g)(?:eq?|t|eqslant)|neq)(?![A-Za-z])")
# Parts of a name besides letters: indices, arguments, dashes. P(X > 2) and f^{-1}(2) are names too.
_PART = re.compile(
    r"_ ?(?:\{[^{}]*\}|[0-9A-Za-z])|(?<=[A-Z])\([^()]*\)|(?<=[A-Za-z}'])\((?:-?[A-Za-z0-9\\|]{1,8}(?:, ?)?){1,3}\)"
    r"|\^ ?(?:\\prime|\{ ?-1 ?\}|\{? ?\* ?\}?)|[|:'~]|\\(?:left|right|displaystyle)(?![A-Za-z])"
)
_POINT = re.compile(r"\([A-Za-z, ]{1,9}\)")
_OPERATION = re.compile(r"[-+*^0-9]|\\(?:times|cdot|div|sqrt|pm|mp|sum|int|lim|prod|d?binom)(?![A-Za-z])")
_RATIO = re.compile(r"\\[dtc]?frac ?\{([^{}]*)\} ?\{([^{}]*)\}|/")
_LETTER = re.compile(r"[A-Za-z]")


def relation(text: str) -> str:
    """Returns the spelling of an equation or inequality as a whole; "" for a value, with or without a name, or a
    calculation."""
    if not RELATION.search(text):
        return ""
    whole = unwrapped(formula(text, right_side=False))
    if not RELATION.search(_PART.sub("", whole)) or (not has_inequality(whole) and not _is_equation(whole)):
        return ""
    return _SIGN.sub(lambda match: _SAME.get(match[0], match[0]), careful_spelling(text, right_side=False))


def has_inequality(text: str) -> bool:
    """Whether a text has an inequality, except in the arguments of a name: P(X > 2)."""
    return bool(INEQUALITY.search(_PART.sub("", text)))


def is_name(text: str) -> bool:
    """Whether a text names a value: x, y_1, f(x), (a,b), |AB|, S:T, the area of ABC."""
    text = text.strip(" $")
    if _POINT.fullmatch(text):
        return True
    text = _RATIO.sub(r"\1 \2", _PART.sub("", text))
    return bool(_LETTER.search(text)) and not _OPERATION.search(text) and "(" not in text and "[" not in text


def _is_equation(text: str) -> bool:
    left, _, right = _PART.sub("", text).partition("=")
    return not is_name(left) and bool(_LETTER.search(_OPERATION.sub(" ", _RATIO.sub(r"\1 \2", left + right))))


_OR = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])")
_ORDER_NAMES = {"<=": r"\\leq?(?![A-Za-z])|\u2264|\\leqslant", ">=": r"\\geq?(?![A-Za-z])|\u2265|\\geqslant"}
_ORDER_NAMES |= {"<": r"\\lt(?![A-Za-z])", ">": r"\\gt(?![A-Za-z])"}
_ORDER = re.compile(r"([<>]=?)")
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
    for sign, names in _ORDER_NAMES.items():
        text = re.sub(names, sign, text)
    found = [_interval(part) for part in _OR.split(text)]
    letters = {letter for letter, _ in found}
    return "\\cup".join(interval for _, interval in found) if len(letters) == 1 and "" not in letters else ""


def _interval(inequality: str) -> tuple[str, str]:
    parts = [part.strip() for part in _ORDER.split(inequality)]
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
