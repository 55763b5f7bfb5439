"""Tells one answer from a list of answers, and spells a list.

In: the text of an answer, with dollars for all math delimiters. Out: whether it lists several, and one spelling however
they are joined. A list is compared as a whole: if one item could stand for it, every guess would be right.
"""

import re

from dapo.rewards.reading.spelling import RIGHT_OPERATOR, boxed, boxes, careful_spelling, unwrapped

_OR_AND = re.compile(r"(?<![A-Za-z])(?:or|and)(?![A-Za-z])", re.IGNORECASE)
_OR = re.compile(r"(?<=[\s$}])or(?=[\s$\\{])", re.IGNORECASE)
_AND = re.compile(r"(?<![A-Za-z])and(?![A-Za-z])|;|\\q?quad", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<![0-9])(?<![0-9],)[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
# A clause in front that says what two names stand for, without a number: m and n are coprime, so m+n = 113.
_NAME = r"\$?[a-z]\$?"
_ABOUT_NAMES = re.compile(
    rf"[\s*_]*(?:(?:where|since|because|as|with|if)\s+)?{_NAME}(?:,\s*{_NAME})*,?\s+and\s+{_NAME}\s+are\s+"
    r"(?:(?!(?:or|and)(?![a-z]))[a-z-]++\s*+)++,(?=[^,;=]*=[\s$]*(?:\\f?boxed\s*\{\s*)?[-+]?[0-9])",
    re.IGNORECASE,
)
# What says nothing of its own beside a box: words but `or`, and marks.
_REMARK = re.compile(
    r"(?:[\s.,;:!*_$'\u2019]|(?<![A-Za-z])(?:(?!or(?![A-Za-z]))[A-Za-z]{2,}+|a(?![A-Za-z])))*+", re.IGNORECASE
)
_REASON = re.compile(r"([\s$*]*),?\s*(?:where|since|because)(?![A-Za-z])", re.IGNORECASE)
_OTHERWISE = re.compile(
    r"(?<![A-Za-z])(?:or|else|otherwise|if|when|but|except|unless|odd|even|while|another|other|also|alternatively|maybe"
    r"|perhaps|possibly|not)(?![A-Za-z])",
    re.IGNORECASE,
)
_SEPARATOR = re.compile(r"[,;]")
_NUMBER_FORMULA = re.compile(r"\$\s*([-+]?[0-9][0-9.,]*)\s*\$")
_QUAD = re.compile(r"\\q?quad(?![A-Za-z])")
_IN_BRACKETS = re.compile(r"\([^()]*\)|\[[^\[\]]*\]")
_DIGIT = re.compile(r"[0-9]")
_DIGIT_OR_LETTER = re.compile(r"[0-9]|^[^A-Za-z]*[A-Za-z][^A-Za-z]*$")  # a number, or a choice such as (C)
_NEGATIVE_SPACE = re.compile(r",\\!\s*")  # in thousands: 32,\! 349
# Parts that say nothing but (3,4), z = (3,4), or (5).
_NAMED = r"[\s$*]*(?:\\?[A-Za-z]{1,8}(?:_\{?[0-9A-Za-z]\}?)?\s*=)?[\s$*]*"
_TUPLE = re.compile(_NAMED + r"[(\[][^()\[\]]*,[^()\[\]]*[)\]][\s$*.]*")
_ENCLOSED = re.compile(_NAMED + r"\((?:[^(),]*[0-9][^(),]*|\s*[A-J]\s*)\)[\s$*.]*")

_FORMULA = re.compile(r"(?<![A-Za-z])(?:frac|sqrt|times|cdot|div|pi|pm|circ)(?![A-Za-z])")
_MARKUP = re.compile(r"\\(?:text|textnormal|textbf|mathrm|mbox|q?quad)(?![A-Za-z])|[${}*_`\\]")
_WORD = re.compile(r"[A-Za-z]{2,}")
_HEDGED = r"(?<![A-Za-z])(?:or|and)(?:\s+(?:maybe|perhaps|possibly|probably|even|also|else|then|just))*[^A-Za-z]*$"
_BEGINS_WITH_OR = re.compile(r"[^A-Za-z.!?]*(?:or|and)(?![A-Za-z])", re.IGNORECASE)
_ENDS_WITH_OR = re.compile(_HEDGED, re.IGNORECASE)
# Between boxes for several cases, for even n and for odd ones; a step that goes on to the next box has a verb or `so`.
_CASES = re.compile(
    r"[^A-Za-z.!?]*(?:but\s+)?(?:also|alternatively|as\s+well\s+as|otherwise|for|if|when|where)(?![A-Za-z])"
    r"(?:(?!(?<![A-Za-z])(?:so|thus|hence|therefore|then|gives|we|get|yields|wait|(?:is|are)(?=[^A-Za-z]*$))"
    r"(?![A-Za-z]))[^.!?:])*+$",
    re.IGNORECASE,
)
# Between two labels on a line: 41 or Answer: 42.
_JOINS_LABELS = re.compile(
    r"(?:[,;/]|(?<![A-Za-z])(?:or|and)(?:\s+(?:the|my|final|maybe|perhaps|possibly|probably|another|alternative))*)"
    r"[\s*_`$]*$",
    re.IGNORECASE,
)
_UNIT = re.compile(r"[^A-Za-z.!?]*[A-Za-z]+[^A-Za-z:]*")  # \boxed{3} cm, \boxed{4} cm
_ITEM = re.compile(r"[0-9]|(?<![A-Za-z\\])[A-Z](?![A-Za-z])")


def last_answer(line: str) -> str:
    """Returns what counts of a line with boxes: the last one, and those that it is joined with as an alternative.

    `\\boxed{41} or \\boxed{42}` are two answers; of `\\boxed{41}. Wait, that is wrong: \\boxed{42}` the last counts.
    Of boxes within a box the outer one counts: `\\boxed{41 or \\boxed{42}}`.
    """
    found = boxes(line, outermost=True)
    first = len(found) - 1
    while first > 0 and _are_joined(line[found[first - 1][1] : found[first][0]]):
        first -= 1
    if len({inside for _, _, inside in found[first:]}) > 1:
        return line[found[first][0] :] if first else line
    begin, end, _ = found[-1]
    return line[begin:end]


def joins_labels(between: str) -> bool:
    """Returns whether what stands between two labels makes the answers behind them alternatives: 41 or Answer: 42."""
    return "\n" not in between and bool(_ITEM.search(between)) and bool(_JOINS_LABELS.search(between))


def is_list(text: str) -> bool:
    """Returns whether a text lists answers: `or`, `and`, commas, semicolons or wide spaces between items, boxes,
    tuples or formulas of numbers that differ.

    Commas in thousands and brackets separate nothing, and a sentence such as `Hence, $x$ is 5` has one item; so have
    `m and n are coprime, so m+n = 113` and `\\boxed{34} and thus done`.
    """
    if about := _ABOUT_NAMES.match(text):
        text = text[about.end() :]
    text = _without_remarks(text)
    if _OR_AND.search(text) or ("box" in text and len(set(boxed(text))) > 1):
        return True
    if len(set(_NUMBER_FORMULA.findall(text.rpartition("=")[2]))) > 1:
        return True
    text = _QUAD.sub(";", text)
    if not _SEPARATOR.search(text):
        return False
    text = unwrapped(_without_box(_without_thousands(text)))
    parts = _split(text, _SEPARATOR)
    if sum(bool(_TUPLE.fullmatch(part)) for part in parts) > 1:
        return True
    enclosed = sum(bool(_ENCLOSED.fullmatch(part)) for part in parts) if _ENCLOSED.fullmatch(parts[-1]) else 0
    item = _DIGIT if "=" in text else _DIGIT_OR_LETTER  # with a, b coprime, a + b = 5
    bare = _SEPARATOR.split(_IN_BRACKETS.sub("", text))
    return enclosed + sum(bool(item.search(part)) for part in bare) > 1


def has_separator(text: str) -> bool:
    """Returns whether a comma or semicolon stands in a text, but for thousands, brackets and its end; or wide space."""
    return bool(
        _QUAD.search(text) or _SEPARATOR.search(_IN_BRACKETS.sub("", _without_thousands(text)).rstrip(" $.,;*}"))
    )


def list_spelling(text: str) -> str:
    """Returns the careful spelling of a list as a whole, without the sentence around its box or formula; "" where that
    would leave answers out: `C, D or $A, B$` is not `A, B`."""
    around = _around(text)
    if around is None or _leaves_out(around):
        return ""
    return careful_spelling(text, right_side=False)


def items_spelling(text: str) -> str:
    """Returns the careful spellings of a list's items, the same for `1, 2`, `1 and 2` and `\\boxed{1}; \\boxed{2}`.

    `1,2 or 3,4` says something else than `1,2,3,4`: between lists stand semicolons.
    """
    groups = [[careful_spelling(item, right_side=False) for item in group] for group in items(text)]
    joint = "," if all(len(group) == 1 for group in groups[1:]) else ";"
    return joint.join(",".join(group) for group in groups)


def items(text: str) -> list[list[str]]:
    """Returns the items of a list as they are written: groups with `or`, `and`, a semicolon or wide space between, of
    items with commas between. What stands in brackets is not taken apart."""
    text = unwrapped(text)
    around = _around(text)
    if around is not None and not _leaves_out(around):
        text = around[1]
    text = _OR_AND.sub(";", _QUAD.sub(";", _without_thousands(text)))
    groups = [_split(group, re.compile(",")) for group in _split(text, re.compile(";"))]
    kept = [[item for item in group if item.strip(" .:*_`$")] for group in groups]
    return [group for group in kept if group]


def alternatives(text: str) -> list[str]:
    """Returns the items of `1/2 or 0.5` and `x = 1/2 or x = 0.5`, up to four; none where anything but
    `or` joins them, or they have different names."""
    text = unwrapped(text)
    if _AND.search(text) or not _OR.search(text):
        return []
    found = items(text)
    names = {name for item in sum(found, []) if (name := item.rpartition("=")[0].strip(" $"))}
    one_each = 1 < len(found) <= 4 and all(len(group) == 1 for group in found)
    return [item for [item] in found] if one_each and len(names) < 2 else []


def _are_joined(between: str) -> bool:
    """Returns whether a text between two boxes makes them alternatives, or parts of one expression, rather than the
    second one the better answer."""
    if RIGHT_OPERATOR.match(between):
        return True
    text = _FORMULA.sub(" ", _MARKUP.sub(" ", between)).strip()
    if text == "=":
        return False
    if not _WORD.search(_OR_AND.sub(" ", text)):
        return True
    joined = _BEGINS_WITH_OR.match(text) or _ENDS_WITH_OR.search(text) or _UNIT.fullmatch(text) or _CASES.match(text)
    return bool(joined)


def _around(text: str) -> tuple[str, str, str] | None:
    """Returns what stands before, in and behind the box of a text, or else its formula; all is in it where there is
    neither; None where there are several boxes."""
    found = boxes(text)
    if len({inside for _, _, inside in found}) > 1:
        return None
    if found:
        return text[: found[0][0]], found[-1][2], text[found[-1][1] :]
    parts = text.replace("$$", "$").replace("\\$", "").split("$")
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else ("", text, "")


def _leaves_out(around: tuple[str, str, str]) -> bool:
    """Returns whether further answers stand before or behind."""
    before, _, behind = around
    if _ITEM.search(before):
        joined = before.rstrip(" $*_`").endswith((",", ";")) and not _WORD.search(before)
        if joined or _ENDS_WITH_OR.search(before):
            return True
    if _ITEM.search(behind):
        joined = behind.lstrip(" $*_`").startswith((",", ";")) and not _WORD.search(behind)
        return joined or bool(_BEGINS_WITH_OR.match(behind))
    return False


def without_reason(text: str) -> str:
    """Returns the text without a clause behind its only box that says where that comes from: `, where m and n are 2 and
    3`."""
    found = boxes(text, outermost=True)
    if len(found) != 1:
        return text
    end = found[0][1]
    reason = _REASON.match(text, end)
    if not reason or _OTHERWISE.search(text, end) or not _REMARK.fullmatch(text[: found[0][0]]):
        return text
    return text[:end] + reason[1]


def _without_remarks(text: str) -> str:
    """Returns the box of a text alone where it has one, and only words stand beside it, without an `or`."""
    found = boxes(text, outermost=True)
    if len(found) != 1:
        return text
    begin, end, _ = found[0]
    return text[begin:end] if _REMARK.fullmatch(f"{text[:begin]} {text[end:]}") else text


def _without_box(text: str) -> str:
    """Returns the text with its first box as what that holds."""
    for begin, end, inside in boxes(text)[:1]:
        return text[:begin] + inside + text[end:]
    return text


def _without_thousands(text: str) -> str:
    """Returns the text without the commas and thin spaces inside numbers."""
    text = _NEGATIVE_SPACE.sub(",", text.replace("{,}", ","))
    text = text.replace("\\!", "").replace("\\,", "").replace("\\;", "")
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Returns the parts between the separators, each of one character, that stand in no bracket."""
    parts, start, depth = [], 0, 0
    for place, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth = max(0, depth - 1)
        elif depth == 0 and separator.match(char):
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]
