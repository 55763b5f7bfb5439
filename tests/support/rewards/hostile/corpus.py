"""A corpus of hostile responses made by code, for tests of verifiers and of the processes that run them.

In: a seed, a number of hostile responses and a folder; out: that many items over all classes of `KINDS`, each followed
by a control whose verdict is known. No hostile response is right. A payload that gets executed makes a folder or file
in `trace` (by absolute path, or in the working directory: run the verifier in that folder), and most of them also
evaluate to the ground truth, so that an execution which a sandbox keeps from leaving a trace shows as a wrong verdict.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from tests.support.rewards.hostile.answers import ANSWERS
from tests.support.rewards.hostile.injections import INJECTIONS
from tests.support.rewards.hostile.texts import TEXTS

KINDS = (*ANSWERS, *INJECTIONS, *TEXTS)
MAX_TRACE_CHARS = 120  # with a longer path the payloads would not fit into the 300 characters that are read
FORMS = (
    "We go step by step.\nAnswer: {}",
    "So it is $\\boxed{{}}$",
    "Answer: ${}$",
    "**Answer:** {}",
    "Done.\nAnswer: \\boxed{{}}.",
    "It follows that \\boxed{{}}<|im_end|>",
    "Answer:\n\\[\n{}\n\\]",
    "answer : {}\n",
)
# Of an injection: the form in which evaluators look for code comes first.
WRAPPERS = ("{}", "\\text{{}}", "${}$", "\\operatorname{{}}", "\\mathrm{{}}", "({})")
# Ground truth, and spellings of it that are right by the default rule.
RIGHT = (
    ("42", ("42", "42.0", "042", "$42$", "+42", "42.", "\\boxed{42}", "x = 42", "42 cm", "**42**", "42<|im_end|>")),
    ("1,080", ("1080", "1,080", "1080.00", "\\$1,080", "1{,}080", "1 080", "1080 dollars")),
    ("0.5", ("1/2", "\\frac{1}{2}", "0.50", ".5", "\\dfrac12", "$\\frac{1}{2}$")),
    ("-3", ("-3", "\u22123", "-3.0", "$-3$", "\\boxed{-3}")),
    ("\\frac{3}{4}", ("0.75", "3/4", "\\frac{3}{4}", "\\tfrac{3}{4}", "6/8")),
    ("025", ("25", "025", "25.0", "\\text{25}")),
    ("\\frac{\\pi}{2}", ("\\frac{\\pi}{2}", "$\\frac{\\pi}{2}$", "\\dfrac{\\pi}{2}")),
    ("x^2+1", ("x^2+1", "x^2 + 1", "$x^{2}+1$")),
    ("2\\sqrt{3}", ("2\\sqrt{3}", "2\\sqrt3", "$2 \\sqrt{3}$")),
)
WRONG = ("41", "-42", "1081", "1/3", "0.51", "4.2", "\\frac{3}{5}", "\\frac{\\pi}{3}", "x^2-1", "3\\sqrt{2}", "no idea")


@dataclass(frozen=True, slots=True)
class Item:
    """One response. kind: its class, of `KINDS` or "control"; right: the verdict that a verifier owes it."""

    kind: str
    solution_str: str
    ground_truth: str
    right: bool


def corpus(seed: int, count: int, trace: Path) -> list[Item]:
    """count hostile items, the classes in turn, each followed by a control: right and wrong ones alternate.

    The same arguments give the same items; successive rounds over the classes take successive payloads of each.
    Raises ValueError for a trace path that does not fit into a payload.
    """
    if len(str(trace)) > MAX_TRACE_CHARS:
        raise ValueError(f"`trace` ({trace}) must be at most {MAX_TRACE_CHARS} characters long; take a shorter folder")
    rng = random.Random(seed)
    items: list[Item] = []
    for index in range(count):
        turn, place = divmod(index, len(KINDS))
        items += [hostile(KINDS[place], rng, seed + turn, trace), control(rng, index)]
    return items


def hostile(kind: str, rng: random.Random, turn: int, trace: Path) -> Item:
    """The payload number `turn` (modulo their number) of a class, in a form that moves with it."""
    if kind in TEXTS:
        texts = TEXTS[kind](rng)
        text, truth = texts[turn % len(texts)]
        return Item(kind, text, truth, right=False)
    if kind in ANSWERS:
        answers = ANSWERS[kind](rng)
    else:
        name = f"{kind.split()[0]}-{turn}-{rng.randrange(10**6)}"
        answers = INJECTIONS[kind](rng, f"{trace}/{name}" if turn % 3 else name)
    answer, truth = answers[turn % len(answers)]
    if kind in INJECTIONS:
        answer = WRAPPERS[turn // 2 % len(WRAPPERS)].replace("{}", answer, 1)
    forms = (*FORMS, "{}") if kind in INJECTIONS else FORMS  # bare: a pickle begins with the first character
    form = forms[(turn + KINDS.index(kind)) % len(forms)]
    return Item(kind, form.replace("{}", answer, 1), truth, right=False)


def control(rng: random.Random, index: int) -> Item:
    """An ordinary answer; even indices are right."""
    truth, spellings = rng.choice(RIGHT)
    right = index % 2 == 0
    answer = rng.choice(spellings) if right else rng.choice([text for text in WRONG if text not in spellings])
    filler = "The next step follows from the last one. " * rng.randrange(60)
    return Item("control", f"{filler}\nAnswer: {answer}", truth, right)
