"""Finds the answer inside a longer text: a choice before its text, a number with what it counts, a final sentence. The
caller compares the part only with a text that is such a part alone: `5 apples` matches 5, but not `5 oranges`."""

import re
from fractions import Fraction

from dapo.rewards.reading.relations import is_name
from dapo.rewards.reading.spelling import careful_spelling, formula, number, unwrapped

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
