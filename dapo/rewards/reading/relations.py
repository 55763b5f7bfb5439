"""Distinguishes equations and inequalities (x + 2y = 0, x >= 2) from named values (m = 5, f(2) = 5). A relation is
compared as a whole, because one side says little: otherwise `0` would be correct for every plane."""

import re

from dapo.rewards.reading.spelling import careful_spelling, formula, unwrapped

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
