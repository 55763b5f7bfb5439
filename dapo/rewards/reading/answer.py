"""Finds the answer of a solution, parses it, and compares it with the ground truth. The answer follows the last
`Answer:` in the last 300 characters (DAPO's rule, paper section 2.4), or else is the content of the last \\boxed{...}
there. The limit of 300 characters bounds the work."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from dapo.rewards.reading.dress import inner_answers, only_exact, repeating_decimal
from dapo.rewards.reading.lists import (
    alternatives,
    has_separator,
    is_list,
    items_spelling,
    joins_labels,
    last_answer,
    list_spelling,
    without_reason,
)
from dapo.rewards.reading.relations import relation
from dapo.rewards.reading.spelling import (
    boxed,
    braced,
    careful_spelling,
    dapo_spelling,
    enclosed_number,
    line_of_last_box,
    number,
    plain_number,
    printable,
    without_tokens,
)
from dapo.rewards.reading.symbols import as_latex
from dapo.rewards.reading.units import unit

TAIL_CHARS = 300  # only this part of a solution is searched
MAX_TRUTH_CHARS = 1000  # longer than any answer in the tail

_LABEL = re.compile(r"answer[\s*_`]*[:\uff1a]", re.IGNORECASE)
# A heading alone on its line: **Answer**, ### Final Answer.
_HEADING = re.compile(
    r"^[ \t]*(?:#{1,6}[ \t]+(?:\*\*|__)?|\*\*|__)(?:the[ \t]+)?(?:final[ \t]+)?answer(?:\*\*|__)?[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_DELIMITERS = re.compile(r"(?<!\\)(?:\\[()\[\]]|\$\$)")
_IN_OTHER_WORDS = re.compile(r"\(\s*(?:or|i\.\s?e\.,?|=)(?![A-Za-z])([^()]*)\)", re.IGNORECASE)
_REAL_NUMBERS = re.compile(r"\\(?:mathbb|Bbb) ?(?:\{ ?R ?\}|R)|(?:^|(?<=\{))\s*all\s+real\s+numbers(?=[\s.}]*$)")
# What may follow an answer at the end of a response.
_ENDING = re.compile(
    r"(?:(?<![A-Za-z])I\s+hope\s+(?:it|this)\s+(?:is\s+correct|helps)|\$?\s*(?:\\blacksquare|\\qed|[∎□■])\s*\$?"
    r"|(?<![A-Za-z])(?:QED|Q\.E\.D))[\s.!*]*$"
)
ENDING_CHARS = 50
_CLOSED_BEFORE = re.compile(r"[\s*_$]*\}")
_CLOSED_BEHIND = re.compile(r"(?<!\\)\}([\s.*_$]*)$")
_DIGIT = re.compile(r"[0-9]")
_TEXTS_OF_JSON = re.compile(r'\s*\[\s*"(?:[^"\\]|\\.)*+"(?:\s*,\s*"(?:[^"\\]|\\.)*+")*+\s*\]\s*')
_ONE_LETTER = re.compile(r"[A-J]")
_RATIO = re.compile(r"([1-9][0-9]*):([1-9][0-9]*)")
_CAPITALIZED = re.compile(r"N[oO]|YES|TRUE|FALSE|[A-Z][a-z]{2,}")
_CLOCK = re.compile(r"([0-9]{1,2}:[0-9]{2})([ap])\.?m\.?", re.IGNORECASE)

# Placeholders for "no answer" from scorers, tables or the prompt's example; never correct.
_SENTINELS = frozenset(
    ["invalid", "invalidanswer", "noanswer", "unscorable", "none", "null", "nan", "\ufffd"]
    + ["answer", "theanswer", "youranswer", "finalanswer"]
)
_UPPER_SENTINELS = ("N/A", "NA", "<NA>", "NaT")  # n/a is a fraction


@dataclass(frozen=True, slots=True)
class Reading:
    """A parsed answer. Made by `read`; compared by `agree`.

    dapo, careful: its two spellings. value: its exact number, else None. several: whether it is a list of answers.
    items: spelling of a list's items, "" for one answer. nothing: it is empty, a word such as [INVALID], or has digits
    other than 0 to 9, so it is never correct. shown: the text to record, printable; of a list, the whole text.
    relation: spelling of an equation or inequality as a whole; "" for a value. unit: unit of the number. inner: the
    parts that may be the answer alone, 5 of `5 apples`, C and 42 of `(C) 42`.
    """

    dapo: str
    careful: str
    value: Fraction | None
    several: bool
    items: str
    nothing: bool
    shown: str
    relation: str = ""
    unit: str = ""
    inner: tuple["Reading", ...] = ()


NO_ANSWER = Reading(dapo="", careful="", value=None, several=False, items="", nothing=True, shown="")


def find_answer(solution: str) -> str:
    """Returns the text of the answer as written, or "". It is the first line with more than markup after the last label
    that has one (a display formula may follow the colon). Labels have precedence over boxes, as in DAPO's prompt. The
    last label or box counts, with those on its line that it is joined with (`last_answer`)."""
    tail = braced(solution[-TAIL_CHARS:])
    for start in _begins(tail):
        for line in map(_without_braces, tail[start:].split("\n")):
            if _says_something(line):
                return last_answer(line) if len(set(boxed(line))) > 1 else line
    if line := line_of_last_box(tail):
        return last_answer(line)
    headings = [heading.end() for heading in _HEADING.finditer(tail)]
    lines = (line for start in headings[::-1] for line in tail[start:].split("\n"))
    return next(filter(_says_something, lines), "")


def _begins(tail: str) -> list[int]:
    """Returns where the text after each label begins, last label first; of `Answer: 41 or Answer: 42` only the
    first."""
    begins: list[int] = []
    for label in _LABEL.finditer(tail):
        if not (begins and joins_labels(tail[begins[-1] : label.start()])):
            begins.append(label.end())
    return begins[::-1]


def _without_braces(line: str) -> str:
    """Removes unmatched closing braces at both ends of the line, which belong to the label: `\\textbf{Answer:} 42`."""
    missing = line.count("}") - line.count("{")
    if missing > 0 and (before := _CLOSED_BEFORE.match(line)):
        line, missing = line[before.end() :], missing - 1
    while missing > 0 and (behind := _CLOSED_BEHIND.search(line)):
        line, missing = line[: behind.start()] + behind[1], missing - 1
    return line


def read(text: str) -> Reading:
    """Parses an answer's text; used for both solutions and ground truths. If DAPO's spelling is a number, that is the
    value, so that every answer that DAPO's rule accepts is accepted."""
    if not text.isascii() and any(char.isdecimal() and not char.isascii() for char in text):
        return NO_ANSWER
    text = as_written(text)
    reading = _read(text)
    return reading if reading.nothing else replace(reading, inner=tuple(_inner(text, reading)))


def _inner(text: str, whole: Reading) -> Iterator[Reading]:
    if whole.value is not None and "$" not in text and "{" not in whole.careful:
        return  # nothing but a number
    repeating = repeating_decimal(whole.careful)
    for part in (repeating,) if repeating else inner_answers(text, several=whole.several):
        inner = _read(part)
        if not inner.several and not inner.nothing:
            yield inner


def _read(text: str) -> Reading:
    careful = careful_spelling(text)
    dapo = dapo_spelling(text)
    word = careful.strip("[]<>(){}\\'?!- ").lower().replace("_", "")
    if word in _SENTINELS or careful in _UPPER_SENTINELS or not (careful or any(map(str.isalnum, dapo))):
        return NO_ANSWER
    if is_list(text):
        return _one_of_all(text) or _read_list(text)
    value, shown = plain_number(dapo), dapo
    if value is None:
        value, shown = number(careful), careful
    if value is None and not has_separator(text):  # not for one of two values: `x = 4, y = (5)`
        value = enclosed_number(careful)
    return Reading(
        dapo=dapo,
        careful=careful,
        value=value,
        several=False,
        items="",
        nothing=False,
        shown=shown,
        relation=relation(text),
        unit=unit(text),
    )


def _one_of_all(text: str) -> Reading | None:
    """Returns the reading of a list whose items are all the same answer (1/2 or 0.5), else None."""
    first, *others = [*map(_read, alternatives(text))] or [NO_ANSWER]
    one = all(not other.several and other.unit == first.unit and _same(other, first) for other in others)
    return first if others and not first.several and one else None


def _read_list(text: str) -> Reading:
    whole, items, shown = list_spelling(text), items_spelling(text), printable(text.strip())
    return Reading(dapo="", careful=whole, value=None, several=True, items=items, nothing=False, shown=shown)


def as_written(text: str) -> str:
    """Normalizes an answer's text: dollars for all math delimiters, braces in all boxes, commands for Unicode
    mathematics; removes special tokens, closing phrases, and the decimal approximation of an exact value."""
    text = as_latex(without_tokens(text))
    if ending := _ENDING.search(text, max(0, len(text) - ENDING_CHARS)):
        text = text[: ending.start()]
    text = _REAL_NUMBERS.sub(r"(-\\infty,\\infty)", _DELIMITERS.sub("$", braced(text)))
    return only_exact(_IN_OTHER_WORDS.sub(r" or \1", without_reason(text) if "box" in text else text))


@lru_cache(maxsize=4096)
def read_truth(text: str) -> Reading:
    """Parses a ground truth; cached, because all responses of a group share it."""
    text = truth_text(text)
    truth = read(text) if len(text) <= MAX_TRUTH_CHARS else NO_ANSWER
    if repeating := repeating_decimal(truth.careful):
        return read(repeating)
    if ratio := _RATIO.fullmatch(truth.careful):
        return replace(truth, inner=(_read(f"{ratio[1]}/{ratio[2]}"),))
    return truth


def truth_text(text: str) -> str:
    """Returns the text of a ground truth that is a JSON list of one (`["34"]`), or the first of a list whose texts are
    all the same answer; any other text unchanged."""
    texts = truth_texts(text)
    first = read(texts[0]) if len(texts) > 1 else NO_ANSWER
    return texts[0] if all(_same(read(other), first) for other in texts[1:]) else text


def truth_texts(text: str) -> list[str]:
    try:
        return list(json.loads(text)) if len(text) <= MAX_TRUTH_CHARS and _TEXTS_OF_JSON.fullmatch(text) else [text]
    except json.JSONDecodeError:
        return [text]


def agree(answer: Reading, truth: Reading) -> bool:
    """Whether two readings are the same answer: by value if both are numbers, else by spelling (ignoring a word's
    initial capital), lists item by item in order. Different units never agree. One side may be an inner reading; an
    inner reading of the ground truth must be a number."""
    if answer.unit and truth.unit and answer.unit != truth.unit:
        return False
    if any(_same(reading, truth) for reading in (answer, *answer.inner)):
        return True
    return any(inner.value is not None and _same(answer, inner) for inner in truth.inner)


def _same(answer: Reading, truth: Reading) -> bool:
    if answer.nothing or truth.nothing or answer.several != truth.several:
        return False
    if truth.relation:
        return answer.relation == truth.relation
    if answer.dapo and answer.dapo == truth.dapo:
        return True
    if answer.value is not None and truth.value is not None:
        return answer.value == truth.value
    if answer.items and answer.items == truth.items:
        return True
    return bool(answer.careful) and _uncapitalized(answer.careful) == _uncapitalized(truth.careful)


def _uncapitalized(text: str) -> str:
    """Returns `yes` for `Yes` and `YES`, 3:45pm for 3:45 P.M.; single letters and products such as AB stay
    unchanged."""
    if clock := _CLOCK.fullmatch(text):
        return f"{clock[1]}{clock[2].lower()}m"
    return text.lower() if _CAPITALIZED.fullmatch(text) else text


def _says_something(line: str) -> bool:
    if not line or line.isspace():
        return False
    return bool(_DIGIT.search(line) or careful_spelling(line)) or any(map(str.isalnum, dapo_spelling(line)))
