"""Accepts only LaTeX that is safe for a computer algebra system: short, flat, known commands, small numbers. A power
tower, a factorial, 60 parentheses or a matrix of 30,000 columns fit in one line and hang a process or exhaust its
memory. Accepted expressions usually take milliseconds; the child's limits handle the exceptions."""

import math
import re

MAX_CHARS = 200
MAX_DEPTH = 6  # of brackets of all kinds
MAX_DIGITS = 15  # of one number
MAX_EXPONENT = {"number": 1000, "letter": 100, "group": 20}  # by base: 2^n (per digit), x^n, (x+1)^n
MAX_EXPONENTS = 20_000  # the product of all exponents above 10
MAX_COSTLY = 8  # roots, fractions and functions: each may double the work of simplification
MAX_LETTERS = 6  # different variables
MAX_ITEMS = 24  # of a list, set, tuple or matrix

_CHARS = re.compile(r"[A-Za-z0-9 +\-*/^_=<>()\[\]{}|,.;&\\%]*")
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)")
_NUMBER = re.compile(r"[0-9]+(?:[.,][0-9]+)*")
_SCIENTIFIC = re.compile(r"[0-9.] ?[eE] ?[+-]? ?[0-9]")  # sympy expands 1E+999999999
_WORD = re.compile(r"[A-Za-z]{4,}")
_LETTER = re.compile(r"[A-Za-z]")
_ENVIRONMENT = re.compile(r"\\(?:begin|end) ?\{(?:[pbv]?matrix)\}")
_COSTLY = frozenset(
    ["\\frac", "\\sqrt", "\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc", "\\arcsin", "\\arccos", "\\arctan"]
    + ["\\sinh", "\\cosh", "\\tanh", "\\ln", "\\log", "\\exp"]
)
_COMMANDS = _COSTLY.union(
    ["\\pi", "\\infty", "\\cup", "\\cap", "\\setminus", "\\emptyset", "\\varnothing", "\\in", "\\pm", "\\mp"],
    ["\\cdot", "\\times", "\\div", "\\le", "\\leq", "\\ge", "\\geq", "\\lt", "\\gt", "\\ne", "\\neq", "\\circ"],
    ["\\left", "\\right", "\\quad", "\\{", "\\}", "\\,", "\\;", "\\:", "\\!", "\\ ", "\\%", "\\\\", "\\|"],
    ["\\alpha", "\\beta", "\\gamma", "\\delta", "\\epsilon", "\\varepsilon", "\\theta", "\\lambda", "\\mu", "\\nu"],
    ["\\rho", "\\sigma", "\\tau", "\\phi", "\\varphi", "\\omega", "\\Delta", "\\Omega"],
)


def is_tame(latex: str) -> bool:
    """Whether an expression may be parsed. Linear in its length, except for a scan of each exponent."""
    if len(latex) > MAX_CHARS or not latex or not _CHARS.fullmatch(latex):
        return False
    bare, environments = _ENVIRONMENT.subn(" ", latex)
    if environments not in (0, 2) or (environments == 0 and ("&" in bare or "\\\\" in bare)):
        return False
    if bare.count(",") + bare.count(";") + bare.count("&") + bare.count("\\\\") >= MAX_ITEMS or "**" in bare:
        return False
    if _SCIENTIFIC.search(bare):
        return False
    commands = _COMMAND.findall(bare)
    if not _COMMANDS.issuperset(commands) or sum(command in _COSTLY for command in commands) > MAX_COSTLY:
        return False
    letters = _COMMAND.sub(" ", bare)
    if _WORD.search(letters) or len(set(_LETTER.findall(letters))) > MAX_LETTERS:
        return False
    numbers = _NUMBER.findall(bare)
    return all(len(one) <= MAX_DIGITS for one in numbers) and _is_flat(bare) and _powers_are_small(bare)


def _is_flat(latex: str) -> bool:
    """Whether brackets are balanced and at most MAX_DEPTH deep; half-open intervals may mix ( with ]."""
    depth = bars = 0
    for char in latex:
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth < 0:
                return False
        elif char == "|":
            bars += 1
        if depth > MAX_DEPTH:
            return False
    return depth == 0 and bars <= 4


def _powers_are_small(latex: str) -> bool:
    """Whether there is no power tower, large exponent or large product of exponents, as in
    ((2^{900}+1)^{20}+1)^{20}."""
    total = 1.0
    for match in re.finditer(r"\^", latex):
        exponent = _argument(latex[match.end() :])
        after = latex[match.end() :].lstrip()[len(exponent) :].lstrip(" })")
        if any(char in exponent for char in "^&,") or after.startswith("^"):
            return False
        before = latex[: match.start()].rstrip()
        digits = len(before) - len(before.rstrip("0123456789"))
        limit = MAX_EXPONENT["number" if digits else "letter" if _stands_on_letter(before) else "group"]
        # Multiplied, because 9^{99 \cdot 99 \cdot 99} only has small numbers.
        values = re.findall(r"[0-9]+(?:\.[0-9]+)?", exponent.replace(" ", ""))
        value = math.prod(max(float(one), 1.0) for one in values)
        total *= value if value > 10 else 1.0
        if value * max(digits, 1) > limit or total > MAX_EXPONENTS:
            return False
    return True


def _stands_on_letter(before: str) -> bool:
    return bool(re.search(r"(?:^|[^A-Za-z\\])[A-Za-z]{1,3}$", before))


def _argument(text: str) -> str:
    text = text.lstrip()
    if not text.startswith("{"):
        match = re.match(r"\\[A-Za-z]+|.", text)
        return match[0] if match else ""
    depth = 0
    for end, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return text[: end + 1]
    return text
