"""Reads the unit after a number, so that 2 hours and 2 minutes differ. Numbers are compared without units; answers
differ only if both have a unit known here and the units differ. Words for counted things, such as ways or integers, are
not units."""

import re

from dapo.rewards.reading.spelling import formula, unwrapped

_NAMES = """
dollar dollars usd
cent cents ¢
% percent
degree degrees deg
mm millimeter millimeters millimetre millimetres
cm centimeter centimeters centimetre centimetres
m meter meters metre metres
km kilometer kilometers kilometre kilometres
in inch inches
ft foot feet
yd yard yards
mi mile miles
g gm gram grams
kg kilogram kilograms
lb lbs pound pounds
oz ounce ounces
l liter liters litre litres
s sec secs second seconds
min mins minute minutes
h hr hrs hour hours
day days
week weeks
month months
year years
page pages
student students
meal meals
edge edges
""".split("\n")
_UNITS = {word: names[0] for names in map(str.split, filter(None, _NAMES)) for word in names}
_SPEED = {"mph": ("mi", "/", "h"), "kph": ("km", "/", "h"), "kmh": ("km", "/", "h")}
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_WRAPPED = re.compile(r"\\(?:text|textnormal|textrm|textbf|mathrm|mbox|operatorname)(?![A-Za-z])")
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree|°")
_POWER = re.compile(r"\s*\^\s*\{?\s*([23])\s*\}?")
_SOME = re.compile(r"[A-Za-z%$°¢]")
_LAST_DIGIT = re.compile(r"[0-9][)}\]]*")
_WORD = re.compile(r"[A-Za-z¢]+|[%/]|\u00b2|\u00b3")
_ONLY = re.compile(r"[A-Za-z¢%/²³\s.,~$*\\;:!}]*")


def unit(text: str) -> str:
    """Returns the unit after the last number of an answer in a normal form, `ft2` for square feet; "" for none."""
    if not _SOME.search(text):
        return ""
    wrapped = bool(_WRAPPED.search(text))
    whole = _POWER.sub(lambda match: "²³"[int(match[1]) - 2], _DEGREE.sub(" degrees ", unwrapped(formula(text))))
    *_, last = [None, *_LAST_DIGIT.finditer(whole)]
    behind = whole[last.end() :] if last else whole
    return _read(behind, wrapped) or ("dollar" if "\\$" in text or text.count("$") == 1 else "")


def _read(text: str, wrapped: bool) -> str:
    """wrapped: the text is in a text command, so a single letter is a unit and not a factor."""
    if not _ONLY.fullmatch(text):
        return ""
    parts: list[str] = []
    power = ""
    for word in _WORD.findall(text):
        small = word if len(word) == 1 else word.lower()
        if small in _POWERS:
            power = _POWERS[small]
        elif small in "²³":
            parts.append("2" if small == "²" else "3")
        elif small in ("/", "per"):
            parts.append("/")
        elif small in _SPEED:
            parts += _SPEED[small]
        elif small in _UNITS and (len(word) > 1 or wrapped or word in "%¢"):
            parts += [_UNITS[small], power]
            power = ""
        else:
            return ""
    return "".join(parts)
