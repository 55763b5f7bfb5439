"""Hostile whole responses: per class, pairs of the text and a ground truth that it must fail.

Here the label, the length or the characters are the attack, rather than one answer.
"""

import random
from collections.abc import Callable

Pairs = list[tuple[str, str]]

MEGABYTE = 1_000_000
SPECIAL = ("<|im_end|>", "<|endoftext|>", "</s>", "<|im_start|>", "<pad>", "<unk>", "<|eot_id|>", "[PAD]", "<s>")
INSTRUCTION = (
    "Solve the problem step by step. The last line of your reply has the form Answer: $Answer (without quotes), where "
    "$Answer is the answer to the problem.\n\n{}\n\n"
)


def megabytes(rng: random.Random) -> Pairs:
    """A million characters of one unit, some with a right answer that is too far from the end to count."""
    t = str(rng.randrange(11, 9999))
    units = [
        "9",
        "Answer: ",
        "\\boxed{",
        "1+",
        "\\frac{1}{",
        "$",
        " ",
        "\n",
        "\ufdfa",
        "(",
        "a,",
        "\x00",
        "\ud800",
        "=",
    ]
    unit = rng.choice(units)
    texts = [unit * (MEGABYTE // len(unit)), f"Answer: {t}\n" + rng.choice(units) * (MEGABYTE // 4)]
    texts += ["word " * (MEGABYTE // 5) + f"\nAnswer: {int(t) + 1}", "Answer: " + "1" * MEGABYTE]
    return [(text, t) for text in texts]


def redos(rng: random.Random) -> Pairs:
    """Repetitions on which backtracking expressions take quadratic or exponential time, none of which is a number."""
    t = str(rng.randrange(11, 9999))
    units = [
        "1,",
        "1,111,",
        " ",
        "\t",
        "answer",
        "answer ",
        "answer: ",
        "$ ",
        "{}",
        "{ ",
        "^ ",
        "^{",
        "= ",
        "-",
        "1.1.",
        "0",
    ]
    units += [
        "\\,",
        "\\text{a}",
        "\\left",
        "*_",
        "<|",
        "| ",
        "\\frac ",
        "\\frac{1}",
        "1/",
        "\\sqrt ",
        "hours ",
        "and ",
        "a",
    ]
    units += ["\\boxed", "\\boxed{}", "####", "<think>", "<answer></answer>", "\\text{", "\u2212", "; ", "\\circ", "*`"]
    unit = rng.choice(units)
    short, long = unit * (260 // len(unit)), unit * (100_000 // len(unit))
    texts = [
        f"Answer: {short}!",
        f"Answer: 5{short}x",
        long + "!",
        f"\\boxed{{{short}!}}",
        f"answer{' ' * 280}",
        f"{long}:",
    ]
    return [(text, t) for text in texts]


def labels(rng: random.Random) -> Pairs:
    """The right number without a label, or under one that only looks like it."""
    t = rng.randrange(11, 9999)
    heads = ["\u0410nswer:", "An\u0455wer:", "Answe\u0433:", "\uff21nswer:", "A\u200bnswer:", "Answ\u0435r:", "Answer;"]
    texts = [f"{head} {t}" for head in heads]
    return [(text, str(t)) for text in [*texts, f"Answer {t}", str(t), f"The answer is {t}", f"Answer: ?\n{t + 1}"]]


def shotgun(rng: random.Random) -> Pairs:
    """Many answers, of which the last is wrong."""
    t = rng.randrange(11, 9000)
    others = [f"Answer: {value}" for value in range(t - 10, t + 10)]
    texts = ["\n".join([*others, f"Answer: {t + 10}"]), f"Answer: {t}\nAnswer: {t + 1}", f"Answer: {t}\nAnswer: ?"]
    texts += [f"\\boxed{{{t}}} \\boxed{{{t + 1}}}", " ".join(others), f"Answer: \\boxed{{{t + 1}}} or \\boxed{{{t}}}"]
    return [(text, str(t)) for text in [*texts, "".join(f"\\boxed{{{value}}}" for value in range(t - 9, t + 9))]]


def control_characters(rng: random.Random) -> Pairs:
    a, b = rng.randrange(1, 9), rng.randrange(1, 9)
    marks = ["\x07", "\x08", "\x1b[2K", "\x1b[31m", "\x7f", "\x1a", "\x1c", "\x1f", "\x0b", "\x0c", "\x85", "\x9b"]
    texts = [f"Answer: {a}{mark}{b}" for mark in marks] + [f"Answer: {a}{token}{b}" for token in SPECIAL]
    texts += [f"Answer: {token}" for token in SPECIAL] + [f"Answer: 0\r{a}{b}", f"Answer: {a}0\x08{b}"]
    return [
        (text, f"{a}{b}") for text in [*texts, SPECIAL[rng.randrange(len(SPECIAL))] * 5000, "<|im_start|>assistant\n"]
    ]


def prompt_echo(rng: random.Random) -> Pairs:
    t = rng.randrange(11, 9999)
    problem = f"What is {t - 1} plus 1? Is it {t}?"
    texts = [
        INSTRUCTION.format(problem),
        INSTRUCTION.format(problem) + 'Put your answer on its own line after "Answer:".',
    ]
    texts += [f"{problem} Put your final answer within \\boxed{{}}.", "Answer: $Answer", "Answer: the correct answer"]
    texts += [
        "Answer: \\boxed{ground_truth}",
        "Answer: same as the ground truth",
        f"Answer: {problem}",
        "Answer: Answer:",
    ]
    return [(text, str(t)) for text in texts]


def empty(rng: random.Random) -> Pairs:
    t = str(rng.randrange(11, 9999))
    texts = [
        "",
        " ",
        "\n" * 500,
        "Answer:",
        "Answer: ",
        "Answer: $$",
        "\\boxed{}",
        "Answer: \\boxed{}",
        "Answer: \\text{}",
    ]
    texts += ["Answer: **", "Answer: .", "Answer: \u200b", "Answer:\n\n\n", "Answer: {}", "Answer: $ $", "\\boxed{ }"]
    texts += ["**Answer:**", "Answer: \\[ \\]", "Answer: ``", "\\boxed", "$", "."]
    return [(text, t) for text in texts] + [(text, "") for text in texts]


def nul(rng: random.Random) -> Pairs:
    a, b = rng.randrange(1, 9), rng.randrange(1, 9)
    texts = [f"Answer: {a}\x00{b}", f"Answer: \x00{a}{b}", "Answer: \x00", "\x00" * 5000, f"Ans\x00wer: {a}{b}"]
    texts += [f"\\boxed{{{a}\x00{b}}}", f"Answer: {a}\x00{b}\x00", f"Answer: 0\x00{a}{b}", f"Answer\x00: {a}{b}"]
    return [(text, f"{a}{b}") for text in texts]


def surrogates(rng: random.Random) -> Pairs:
    """Halves of UTF-16 pairs, which no UTF-8 encoder takes: a pipe or a JSON writer may raise on them."""
    a, b = rng.randrange(1, 9), rng.randrange(1, 9)
    marks = ["\ud800", "\udfff", "\udc80", "\ude00\ud83d", "\udcff"]
    texts = [f"Answer: {a}{mark}{b}" for mark in marks] + [f"Answer: {mark}{a}{b}" for mark in marks]
    texts += [
        "\ud800" * 5000,
        "Answer: \ud83d",
        f"\\boxed{{{a}\udcff{b}}}",
        f"\udc41nswer: {a}{b}",
        f"Answer: {a}{b}\ud800",
    ]
    return [(text, f"{a}{b}") for text in texts]


TEXTS: dict[str, Callable[[random.Random], Pairs]] = {
    "megabyte": megabytes,
    "ReDoS bait": redos,
    "look-alike label": labels,
    "several labels": shotgun,
    "control and special tokens": control_characters,
    "prompt echo": prompt_echo,
    "empty": empty,
    "NUL": nul,
    "invalid surrogates": surrogates,
}
