"""DAPO's own rule, as its users run it (verl, reward_score/math_dapo.py), told again to compare our verifier with.

Facts only: what is looked for, which words go, and in which order. It accepts lists, digits of any script and empty
answers; it is not what this project scores with.
"""

import re
from fractions import Fraction

REPLACED = [
    *[("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")],
    *[(r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")],
]
GONE = (
    r"square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents degrees cm gm "
    r"pounds meters meals edges students childrentickets multiples \text{s} \text{.} \text{N*s} \text{}^2 \text{}^3 "
    r'\text{N*} \text{} \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " \dots'
)


def spelled(answer: str) -> str:
    """An answer or a ground truth in the one spelling that the rule compares."""
    answer = answer[answer.rfind("=") + 1 :]
    for pair in [*REPLACED, *((gone.replace("N*", "\n"), "") for gone in GONE.split())]:
        answer = answer.replace(*pair)
    for pattern, kept in [
        (r".*?\$(.*?)\$.*", r"$\1$"),
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
    ]:
        answer = re.sub(pattern, kept, answer)
    answer = answer.replace("$", "")
    bare = answer.replace(",", "")
    return (bare if bare.isdigit() else answer).strip()


def prediction(solution: str) -> str:
    """What the rule takes for the answer of a solution, spelled."""
    lines = re.findall(r"(?i)answer\s*:\s*([^\n]+)", solution[-300:])
    return spelled(lines[-1]) if lines else spelled("[INVALID]")


def accepts(solution: str, ground_truth: str) -> bool:
    """The rule's verdict."""
    return prediction(solution) == spelled(ground_truth)


def value(solution: str) -> Fraction | None:
    """The number that the rule's prediction is in one of a number's spellings, which the rule does not compare."""
    text = re.sub(r"^\((.*)\)$", r"\1", prediction(solution)).replace(",", "")
    text = re.sub(r"([0-9.]+)\\(?:times|cdot)10\^\{?([-+]?[0-9])\}?$", r"\1e\2", text)
    text = re.sub(r"\\frac\{(-?[0-9]+)\}\{([1-9][0-9]*)\}$", r" \1/\2", text).strip()
    try:
        whole, _, part = text.rpartition(" ")
        sign = -1 if whole.startswith("-") else 1
        return (Fraction(whole) if whole else Fraction(0)) + sign * Fraction(part)
    except ValueError:
        return None
