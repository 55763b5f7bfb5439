"""The default verifier: a solution's text and the ground truth in, +1 or -1 out, by DAPO's rule (paper section 2.4).

The last `Answer:` line within the last 300 characters is normalised and compared as a number (integer, decimal or
fraction, exactly) or else as a string. The text is adversarial: it is read by regular expressions over at most 300
characters and never evaluated. What is normalised away follows Minerva (arXiv 2206.14858, appendix D).
"""

import re
from fractions import Fraction
from typing import Any

TAIL_CHARS = 300  # where the answer is looked for; this also bounds the work of every expression below
MAX_NUMBER_CHARS = 100  # a longer number is compared as a string

_MARKER = re.compile(r"answer\s*:", re.IGNORECASE)
_BOXED = re.compile(r"\\f?boxed\s*\{")
_LIST = re.compile(r"[,;]|\b(?:or|and)\b")
_EQUALS = re.compile(r"(?<![<>!])=")
_REMOVED = re.compile(
    r"\\[,!$()\[\]]|\$|\\(?:left|right|displaystyle)(?![a-zA-Z])"  # thin space, math delimiters
    r"|\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|°"
)
_SPACE = re.compile(r"\\[;: ]|\\q?quad(?![a-zA-Z])|~")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_WORD = (
    r"(?:dollars?|cents?|usd|percent|degrees?|units?|square|cubic|mm|cm|km|(?:milli|centi|kilo)?meters?|inch(?:es)?"
    r"|feet|foot|ft|yards?|miles?|mph|(?:kilo)?grams?|kg|pounds?|lbs?|ounces?|oz|lit(?:er|re)s?|sec(?:ond)?s?"
    r"|min(?:ute)?s?|h(?:ou)?rs?|days?|weeks?|months?|years?|points?|ways?|integers?|people|students?|pages?)"
)
# Single letters are no units here: in `3m` they are more often a variable.
_UNIT = re.compile(rf"(?<=[0-9}})]) ?(?:\\?%|{_WORD}(?: (?:per )?{_WORD})*(?: ?\^ ?\{{?[23]\}}?)?)$", re.IGNORECASE)
_SCRIPT = re.compile(r"([_^]) ?\{ ?([0-9A-Za-z]) ?\}")
_SQRT = re.compile(r"\\sqrt ?([0-9])")
_FRAC = re.compile(r"\\frac ?(?:\{([^{}]*)\}|([0-9])) ?(?:\{([^{}]*)\}|([0-9]))")
_LOOSE_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")  # all but those between digits: `1 2` is not 12, `1 1/2` is 1.5

_DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_PLAIN = re.compile(rf"[+-]?{_DECIMAL}")
_SLASH = re.compile(rf"([+-]?)(?:([0-9]+) )?({_DECIMAL})/({_DECIMAL})")
_LATEX = re.compile(rf"([+-]?)([0-9]+)?\\frac\{{([+-]?{_DECIMAL})\}}\{{({_DECIMAL})\}}")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """The verdict on one solution, in verl's signature; data_source and extra_info are not looked at.

    Returns score (1.0 right, -1.0 wrong), acc (the same as a bool) and pred (the normalised answer, "" when there is
    none; printable). Never raises for any solution_str; bounded work whatever it holds.
    """
    answer = extract_answer(solution_str)
    correct = bool(answer) and _same(answer, normalize_answer(str(ground_truth)))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer}


def extract_answer(solution: str) -> str:
    """The normalised answer after the last `Answer:` in the last 300 characters, or "".

    The answer is the first line from there that holds more than markup, so that a display formula may follow the colon.
    """
    tail = solution[-TAIL_CHARS:]
    end = max((match.end() for match in _MARKER.finditer(tail)), default=None)
    if end is None:
        return ""
    return next(filter(None, map(normalize_answer, tail[end:].split("\n"))), "")


def normalize_answer(text: str) -> str:
    """One spelling per answer: no math delimiters, text commands, units of a number, loose spaces or closing dot."""
    text = re.sub(r"\s+", " ", text).replace("\u2212", "-")
    # What cannot be shown must neither vanish (4<NUL>2 is not 42) nor reach a log or a database.
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    text = _right_side(_inside_dollars(_inside_box(_trim(text))))
    text = _SPACE.sub(" ", _REMOVED.sub("", text)).replace("{,}", ",")
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    for _ in range(3):  # \textbf{\text{...}}: deeper nesting is not an answer
        text = _WRAPPER.sub(r" \1 ", text)
    text = _UNIT.sub("", _trim(re.sub(" +", " ", text)))
    text = _FRAC.sub(r"\\frac{\1\2}{\3\4}", _SQRT.sub(r"\\sqrt{\1}", _SCRIPT.sub(r"\1\2", text)))
    return _trim(_LOOSE_SPACE.sub("", text))


def _trim(text: str) -> str:
    """Without markdown emphasis around and punctuation behind."""
    return text.lstrip(" *`").rstrip(" *`.,;:")


def _inside_box(text: str) -> str:
    """The content of the last \\boxed{...}, up to its matching brace; the text itself when there is none."""
    start = max((match.end() for match in _BOXED.finditer(text)), default=None)
    if start is None:
        return text
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return text[start:]


def _inside_dollars(text: str) -> str:
    """The formula of `the answer is $5$ indeed`; the whole text when there are more, or digits outside."""
    parts = text.replace("\\$", "").replace("$$", "$").split("$")
    if len(parts) != 3 or any(char.isdigit() for char in parts[0] + parts[2]):
        return text
    return parts[1]


def _right_side(text: str) -> str:
    """`5` of `x = 2 + 3 = 5`; the whole text when it is a list such as `x = 1 or x = 2`."""
    *left, right = _EQUALS.split(text)
    return text if _LIST.search(" ".join(left)) else right


def _same(answer: str, truth: str) -> bool:
    first, second = _number(answer), _number(truth)
    if first is None or second is None:
        return answer == truth
    return first == second


def _number(text: str) -> Fraction | None:
    """The exact value of an integer, decimal, fraction or mixed number; None for all else.

    No exponents: `1e999999999` would have to be written out.
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    if _PLAIN.fullmatch(text):
        return Fraction(text)
    match = _SLASH.fullmatch(text) or _LATEX.fullmatch(text)
    if match is None or Fraction(match[4]) == 0:
        return None
    sign, whole, top, bottom = match.groups()
    value = Fraction(whole or 0) + Fraction(top) / Fraction(bottom)
    return -value if sign == "-" else value
