"""Finds the answer in a text that says more: a choice before its text, a number with what it counts, a final sentence.

In: the text of one answer, with dollars for all math delimiters. Out: the part that is the answer, which the caller
compares only with a text that is such a part alone: 5 apples are 5, and 5 oranges are 5, but 5 apples are no 5 oranges.
"""

import re
from fractions import Fraction

from dapo.rewards.reading.spelling import formula, unwrapped

# Words that take back what is said, or offer something else.
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

_NUMBER_WORD = (
    r"(?:one|two|three|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|four"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ie)|couple|pair|dozen|score|gross|hundred|thousand|million"
    r"|[bt]rillion|half|halve|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|twelfth|[a-z]+teenth"
    r"|[a-z]+tieth|hundredth|thousandth|millionth)(?:e?s)?"
)
_NO_NOUN = (
    rf"(?!(?:{_NUMBER_WORD}|plus|minus|times|less|more|always|sometimes|perhaps|besides|unless|this|has|was|does|is|its"
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
    r"(?:(?:so|thus|hence|therefore|finally|consequently),?\s+)?(?:the|our|its|their|my)\s+"
    rf"(?P<about>(?:[a-z-]+\s+){{0,3}}{_HEAD}(?![a-z])[^.;:!?=<>]*?)\s+(?:is|equals)\s+(?P<claim>\S+(?:\s\S+)?)",
    re.IGNORECASE,
)
# Of units that are letters, and hence factors elsewhere, those that are set as text.
UNIT_AS_TEXT = re.compile(
    r"(?:\\[,;: ]|[\s~])*\\(?:text|textnormal|textrm|mathrm|mbox)"
    r"\s*\{\s*(?:[kcmd]?[mgslL]|h|ft|in|mi|yd|N|J|W|V|A|K|Pa|Hz)"
    r"(?:/(?:s|min|h|hr))?\s*\}(?:\s*\^\s*\{?\s*[23]\s*\}?)?(?=[\s.$}]*$)"
)
_NO_CLAIM = re.compile(r"(?<!frac)(?<=[A-Za-z])\s*[0-9]")  # of 3 cm 4 the unit is no unit
_REPEATING = re.compile(r"([+-]?)([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\{([0-9]+)\}")


def inner_answer(text: str, *, several: bool) -> str:
    """Returns the part that is the answer; "" where there is none but the whole. several: the text looks like a list,
    as `The sum of m and n is 34` does."""
    flat = _flat(text)
    if (sentence := _SENTENCE.fullmatch(flat)) and not _HEDGE.search(sentence["about"]):
        claim = sentence["claim"].rstrip(",")
        return inner_answer(claim, several=False) or ("" if _NO_CLAIM.search(claim) else claim)
    if several:
        return ""
    if choice := _CHOICE.fullmatch(flat):
        other = choice["text"] and _OTHER_CHOICE.search(choice["text"])
        return "" if other else next(letter for letter in choice.group(1, 2, 4) if letter)
    counted = _PRICE.fullmatch(text.strip(" *.")) or _COUNTED.fullmatch(_flat(formula(text)))
    return counted["number"] if counted else _without_unit(formula(text))


def _without_unit(text: str) -> str:
    unit = UNIT_AS_TEXT.search(text)
    return text[: unit.start()] if unit else ""


def repeating_decimal(text: str) -> str:
    """Returns the fraction that a repeating decimal is in a careful spelling, 1/3 for 0.\\overline{3}; "" for all
    else."""
    if "{" not in text or not (found := _REPEATING.fullmatch(text)):
        return ""
    sign, whole, fixed, period = found.groups()
    value = int(whole + fixed or "0") + Fraction(int(period), 10 ** len(period) - 1)
    value /= 10 ** len(fixed)
    return f"{sign}{value.numerator}" + (f"/{value.denominator}" if value.denominator > 1 else "")


def _flat(text: str) -> str:
    """Returns a text on one line, without box, markup, dollars, text commands and the dot at its end."""
    if box := _BOX_ALONE.fullmatch(text):
        text = box[1]
    text = _SPACE.sub(" ", _MARKS.sub("", unwrapped(text)))
    return " ".join(text.split()).strip(" .")
