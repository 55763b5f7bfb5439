"""Finds the answer of a solution, parses it, and compares it with the ground truth. The answer follows the last
`Answer:` in the last 300 characters (DAPO's rule, paper section 2.4), or else is the content of the last \\boxed{...}
there. The limit of 300 characters bounds the work."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from dapo.answers.lists import (
    alternatives,
    has_separator,
    is_list,
    items_spelling,
    joins_labels,
    last_answer,
    list_spelling,
    without_reason,
)
from dapo.answers.relations import is_name, relation
from dapo.answers.spelling import (
    as_latex,
    boxed,
    braced,
    careful_spelling,
    dapo_spelling,
    enclosed_number,
    formula,
    line_of_last_box,
    number,
    plain_number,
    printable,
    unit,
    unwrapped,
    without_tokens,
)

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


# Words that retract an answer or offer another one.
_TAKES_BACK = (
    r"(?<![A-Za-z])(?:not|never|neither|nor|or|but|either|except|unless|if|whether|maybe|perhaps|possibly|probably|might"
    r"|may|could|cannot|guess|doubt|wrong|incorrect|isn|wasn|aren|don|doesn|rather|instead|than|vs|versus|is|are|was"
    r"|were|equals?)(?![A-Za-z])"
)
_HEDGE = re.compile(
    rf"{_TAKES_BACK}|[?;]|(?<![a-z])(?:(?:an)?other|alternative|possible|rejected|discarded|extraneous)(?![a-z])",
    re.IGNORECASE,
)
_OTHER_CHOICE = re.compile(rf"{_TAKES_BACK}|[?;]|(?i:(?<![A-Za-z])and(?![A-Za-z]))|(?<![A-Za-z\\])[A-Z](?![A-Za-z])")
_BOX_ALONE = re.compile(r"[\s$*.]*\\(?:f?boxed|fbox)\s*\{(.*)\}[\s$*.]*", re.DOTALL)
_SPACE = re.compile(r"\\[ ,;:!]|\\q?quad(?![A-Za-z])|[\s~]")
_MARKS = re.compile(r"\\?\$|\*\*|`")
_CHOICE = re.compile(
    r"(?:(?i:option|choice)\s+)?(?:\(([A-J])\)|([A-J])\s*[).:])\s+(?P<text>\S.*)|(?i:option|choice)\s+\(?([A-J])\)?"
)

NUMBER_WORD = (
    r"(?:one|two|three|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|four"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ie)|couple|pair|dozen|score|gross|hundred|thousand|million"
    r"|[bt]rillion|half|halve|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|twelfth|[a-z]+teenth"
    r"|[a-z]+tieth|hundredth|thousandth|millionth)(?:e?s)?"
)
_NO_NOUN = (
    rf"(?!(?:{NUMBER_WORD}|plus|minus|times|less|more|always|sometimes|perhaps|besides|unless|this|has|was|does|is|its"
    r"|or|and|to|by|in|of|over|not|no|divided|works|fails|root|squared|cubed|factorial|choose|mod|per|others?|among|with"
    r"|without|from|for|at|on|under|above|below|between|except|including|excluding|versus"
    r"|[a-z]+(?:dollars|hours|minutes|miles|meters))(?![a-z]))"  # two words in one
)
_PER = r"(?:/|\s+per\s+|\s+an?\s+)"
_TIME = r"(?:s(?:ec(?:ond)?)?|min(?:ute)?|h(?:(?:ou)?r)?|day|week|month|year)"
_LENGTH = r"(?:[cmk]?m|(?:centi|kilo|milli)?met(?:er|re)s?|ft|feet|foot|inch(?:es)?|yards?|mi(?:les?)?)"
_CURRENCY = r"[\u20ac\u00a3\u00a5\u20b9]"
_NUMBER = (
    r"[-+]?(?:[0-9][0-9., ]*(?:/[0-9][0-9,]*)?|(?:[0-9]+ ?)?\\[dt]?frac ?\{[0-9,]+\} ?\{[0-9,]+\})"
    r"(?: ?(?:\\times|\\cdot|[*\u00d7\u00b7\u22c5]) ?10)?(?:\^\{?-?[0-9]{1,2}\}?)?"
)
_COUNTED = re.compile(
    rf"(?P<number>{_NUMBER})(?:"
    rf"\s+(?:{_NO_NOUN}[a-z]{{3,}}\s+)?(?:{_NO_NOUN}[a-z]{{3,}}(?<![su])s|(?:wo)?men|children|people)"  # red apples
    rf"|\s*{_LENGTH}{_PER}{_TIME}(?:\s*\^\s*\{{?\s*2\s*\}}?)?|\s*deg|\s*\\degree|\s*(?:{_CURRENCY}|\u00a2))"
)
_PRICE = re.compile(rf"(?:(?:US|CA|A)?\\?\$|{_CURRENCY})\s*(?P<number>[0-9][0-9.,]*)(?:{_PER}[a-z]+)?")

_HEAD = (
    r"(?:answer|sum|value|result|total|number|count|product|difference|quotient|remainder|area|volume|perimeter|length"
    r"|width|height|radius|distance|probability|ratio|cost|price|average|mean|median|age|time|speed|solution|minimum"
    r"|maximum|option|choice)"
)
_SENTENCE = re.compile(
    r"(?:(?:so|thus|hence|therefore|finally|consequently),?\s+)?(?:(?:the|our|its|their|my)\s+"
    rf"(?P<about>(?:[a-z-]+\s+){{0,3}}{_HEAD}(?![a-z])[^.;:!?=<>]*?)\s+(?:is|equals)"
    r"|(?:it|this|that)\s+(?:is|equals)|there\s+(?:is|are)|we\s+(?:get|have|obtain|find))"
    r"\s+(?P<claim>\S+(?:\s\S+)?)",
    re.IGNORECASE,
)
# Words for an approximate value; a decimal with its unit and markup.
_ABOUT = re.compile(
    r"(?<![A-Za-z\\])(?:approximately(?![A-Za-z])|approx(?![A-Za-z])\.?)|\\(?:simeq|thickapprox|doteq)(?![A-Za-z])",
    re.IGNORECASE,
)
_DECIMAL = re.compile(
    r"\s*(?P<decimal>-?[0-9][0-9,]*(?:\.[0-9]+)?)(?:\.\.\.|\\l?dots)?"
    r"(?P<end>[\s$})*_.]*(?:(?!(?:or|and)(?![A-Za-z]))[A-Za-z]{1,12}(?:\^\{?[23]\}?)?)?[\s$})*_.]*)"
)
_BEFORE_ABOUT = re.compile(r"(?:\s|,|\(|(?<![A-Za-z])(?:or|which\s+is|that\s+is|i\.e\.)(?![A-Za-z]))*$", re.IGNORECASE)
_EXACT = re.compile(r"/|\^|\\(?:[dtc]?frac|sqrt|pi|log|ln|sin|cos|tan|overline|bar)(?![A-Za-z])")
_IS = re.compile(r"(?<![A-Za-z])(?:is|are|equals)[\s$]*$")
_LETTER_FIRST = re.compile(r"^[^A-Z]*[A-J]")
# Units that are single letters count only in text commands; elsewhere they may be factors.
UNIT_AS_TEXT = re.compile(
    r"(?:\\[,;: ]|[\s~])*\\(?:text|textnormal|textrm|mathrm|mbox)"
    r"\s*\{\s*(?:[kcmd]?[mgslL]|h|ft|in|mi|yd|N|J|W|V|A|K|Pa|Hz)"
    r"(?:/(?:s|min|h|hr))?\s*\}(?:\s*\^\s*\{?\s*[23]\s*\}?)?(?=[\s.$}]*$)"
)
_NO_CLAIM = re.compile(r"(?<!frac)(?<=[A-Za-z])\s*[0-9]")  # a number after a word: 3 cm 4
_REPEATING = re.compile(r"([+-]?)([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\{([0-9]+)\}")


def inner_answers(text: str, *, several: bool) -> tuple[str, ...]:
    """Returns the parts that are the answer (for a choice: its letter and its text); none if only the whole is.
    several: whether the text looks like a list, as `The sum of m and n is 34` does."""
    flat = _flat(text)
    if (sentence := _SENTENCE.fullmatch(flat)) and not _HEDGE.search(sentence["about"] or ""):
        claim = sentence["claim"].rstrip(",")
        return inner_answers(claim, several=False) or (() if _NO_CLAIM.search(claim) else (claim,))
    if several:
        return ()
    if choice := _CHOICE.fullmatch(flat):
        if choice["text"] and _OTHER_CHOICE.search(choice["text"]):
            return ()
        letter = next(letter for letter in choice.group(1, 2, 4) if letter)
        return (letter, choice["text"]) if choice["text"] else (letter,)
    counted = _PRICE.fullmatch(text.strip(" *.")) or _COUNTED.fullmatch(_flat(formula(text)))
    part = counted["number"] if counted else _without_unit(formula(text))
    return (part,) if part else ()


def choice_text(text: str) -> str:
    """Returns the text after the letter of a choice, \\sqrt{2} of `(C) \\sqrt{2}`; any other text unchanged."""
    choice = _CHOICE.fullmatch(_flat(text)) if _LETTER_FIRST.search(text) else None
    return choice["text"] if choice and choice["text"] and not _OTHER_CHOICE.search(choice["text"]) else text


def only_exact(text: str) -> str:
    """Removes the decimal approximation of an exact value: \\frac{1}{3} of `\\frac{1}{3} \\approx 0.333`. If only a
    name precedes it, writes `=` instead. An approximation of a decimal, 33.6 \\approx 34, stays unchanged."""
    text = _ABOUT.sub(r"\\approx ", text)
    before, about, behind = text.rpartition("\\approx")
    found = _DECIMAL.fullmatch(behind) if about else None
    if not found:
        return text
    exact = _BEFORE_ABOUT.sub("", before)
    value = number(careful_spelling(exact).strip("()"))
    if value is not None and not (value.denominator > 1 and _is_near(value, found["decimal"])):
        return text
    if _EXACT.search(exact):
        opened = before[len(exact) :].count("(")
        return exact + found["end"].replace(")", "", opened)
    if not exact.strip(" $*{(") or _IS.search(exact) or exact.endswith(("box{", "boxed{")):
        return exact + behind
    return f"{exact} = {behind}" if is_name(exact) and not _HEDGE.search(exact) else text


def _is_near(value: Fraction, decimal: str) -> bool:
    return abs(Fraction(decimal.replace(",", "")) - value) * 50 <= abs(value)


def _without_unit(text: str) -> str:
    unit = UNIT_AS_TEXT.search(text)
    return text[: unit.start()] if unit else ""


def repeating_decimal(text: str) -> str:
    """Returns the fraction of a repeating decimal in a careful spelling, 1/3 for 0.\\overline{3}; "" for anything
    else."""
    if "{" not in text or not (found := _REPEATING.fullmatch(text)):
        return ""
    sign, whole, fixed, period = found.groups()
    value = int(whole + fixed or "0") + Fraction(int(period), 10 ** len(period) - 1)
    value /= 10 ** len(fixed)
    return f"{sign}{value.numerator}" + (f"/{value.denominator}" if value.denominator > 1 else "")


def _flat(text: str) -> str:
    """Returns the text on one line, without box, markup, dollars, text commands and final dot."""
    if box := _BOX_ALONE.fullmatch(text):
        text = box[1]
    text = _SPACE.sub(" ", _MARKS.sub("", unwrapped(text)))
    return " ".join(text.split()).strip(" .。")
