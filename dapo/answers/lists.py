"""Detects lists of answers and normalizes them, independent of how the items are joined. A list is compared as a whole:
if a single item could match, every guess in a list would be correct."""

import re

from dapo.answers.spelling import RIGHT_OPERATOR, boxed, boxes, careful_spelling, unwrapped

_OR_AND = re.compile(r"(?<![A-Za-z])(?:or|and)(?![A-Za-z])", re.IGNORECASE)
_OR = re.compile(r"(?<=[\s$}])or(?=[\s$\\{])", re.IGNORECASE)
_AND = re.compile(r"(?<![A-Za-z])and(?![A-Za-z])|;|\\q?quad", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<![0-9])(?<![0-9],)[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
# A leading clause about names, without a number: m and n are coprime, so m+n = 113.
_NAME = r"\$?[a-z]\$?"
_ABOUT_NAMES = re.compile(
    rf"[\s*_]*(?:(?:where|since|because|as|with|if)\s+)?{_NAME}(?:,\s*{_NAME})*,?\s+and\s+{_NAME}\s+are\s+"
    r"(?:(?!(?:or|and)(?![a-z]))[a-z-]++\s*+)++,(?=[^,;=]*=[\s$]*(?:\\f?boxed\s*\{\s*)?[-+]?[0-9])",
    re.IGNORECASE,
)
# Text beside a box that is not an answer: marks, and words other than `or`.
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
_DIGIT_OR_LETTER = re.compile(r"[0-9]|^[^A-Za-z]*[A-Za-z][^A-Za-z]*$")  # a number or a choice such as (C)
_NEGATIVE_SPACE = re.compile(r",\\!\s*")  # thousands separator: 32,\! 349
# Parts that are only (3,4), z = (3,4), or (5).
_NAMED = r"[\s$*]*(?:\\?[A-Za-z]{1,8}(?:_\{?[0-9A-Za-z]\}?)?\s*=)?[\s$*]*"
_TUPLE = re.compile(_NAMED + r"[(\[][^()\[\]]*,[^()\[\]]*[)\]][\s$*.]*")
_ENCLOSED = re.compile(_NAMED + r"\((?:[^(),]*[0-9][^(),]*|\s*[A-J]\s*)\)[\s$*.]*")

_FORMULA = re.compile(r"(?<![A-Za-z])(?:frac|sqrt|times|cdot|div|pi|pm|circ)(?![A-Za-z])")
_MARKUP = re.compile(r"\\(?:text|textnormal|textbf|mathrm|mbox|q?quad)(?![A-Za-z])|[${}*_`\\]")
_WORD = re.compile(r"[A-Za-z]{2,}")
_HEDGED = r"(?<![A-Za-z])(?:or|and)(?:\s+(?:maybe|perhaps|possibly|probably|even|also|else|then|just))*[^A-Za-z]*$"
_BEGINS_WITH_OR = re.compile(r"[^A-Za-z.!?]*(?:or|and)(?![A-Za-z])", re.IGNORECASE)
_ENDS_WITH_OR = re.compile(_HEDGED, re.IGNORECASE)
# Text between boxes of several cases (even n, odd n). A solution step has a verb or `so` instead.
_CASES = re.compile(
    r"[^A-Za-z.!?]*(?:but\s+)?(?:also|alternatively|as\s+well\s+as|otherwise|for|if|when|where)(?![A-Za-z])"
    r"(?:(?!(?<![A-Za-z])(?:so|thus|hence|therefore|then|gives|we|get|yields|wait|(?:is|are)(?=[^A-Za-z]*$))"
    r"(?![A-Za-z]))[^.!?:])*+$",
    re.IGNORECASE,
)
# Text between two labels on a line: 41 or Answer: 42.
_JOINS_LABELS = re.compile(
    r"(?:[,;/]|(?<![A-Za-z])(?:or|and)(?:\s+(?:the|my|final|maybe|perhaps|possibly|probably|another|alternative))*)"
    r"[\s*_`$]*$",
    re.IGNORECASE,
)
_UNIT = re.compile(r"[^A-Za-z.!?]*[A-Za-z]+[^A-Za-z:]*")  # \boxed{3} cm, \boxed{4} cm
_ITEM = re.compile(r"[0-9]|(?<![A-Za-z\\])[A-Z](?![A-Za-z])")


def last_answer(line: str) -> str:
    """Returns the last box of a line, with the boxes that it is joined with as alternatives. `\\boxed{41} or
    \\boxed{42}` are two answers; of `\\boxed{41}. Wait, that is wrong: \\boxed{42}` the last counts. Of nested boxes
    the outer one counts: `\\boxed{41 or \\boxed{42}}`."""
    found = boxes(line, outermost=True)
    first = len(found) - 1
    while first > 0 and _are_joined(line[found[first - 1][1] : found[first][0]]):
        first -= 1
    if len({inside for _, _, inside in found[first:]}) > 1:
        return line[found[first][0] :] if first else line
    begin, end, _ = found[-1]
    return line[begin:end]


def joins_labels(between: str) -> bool:
    """Whether the text between two labels makes their answers alternatives: 41 or Answer: 42."""
    return "\n" not in between and bool(_ITEM.search(between)) and bool(_JOINS_LABELS.search(between))


def is_list(text: str) -> bool:
    """Whether a text lists answers: `or`, `and`, commas, semicolons or wide spaces between items; or different boxes,
    tuples or formulas of numbers. Commas in thousands and in brackets do not separate items. `Hence, $x$ is 5`, `m and
    n are coprime, so m+n = 113` and `\\boxed{34} and thus done` are single answers."""
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
    """Whether a text has wide space, or a comma or semicolon other than in thousands, in brackets or at its end."""
    return bool(
        _QUAD.search(text) or _SEPARATOR.search(_IN_BRACKETS.sub("", _without_thousands(text)).rstrip(" $.,;*}"))
    )


def list_spelling(text: str) -> str:
    """Returns the careful spelling of a list as a whole, without the sentence around its box or formula; "" if that
    would drop answers: `C, D or $A, B$` is not `A, B`."""
    around = _around(text)
    if around is None or _leaves_out(around):
        return ""
    return careful_spelling(text, right_side=False)


def items_spelling(text: str) -> str:
    """Returns the careful spellings of a list's items, the same for `1, 2`, `1 and 2` and `\\boxed{1}; \\boxed{2}`.
    Semicolons separate lists, so that `1,2 or 3,4` differs from `1,2,3,4`."""
    groups = [[careful_spelling(item, right_side=False) for item in group] for group in items(text)]
    joint = "," if all(len(group) == 1 for group in groups[1:]) else ";"
    return joint.join(",".join(group) for group in groups)


def items(text: str) -> list[list[str]]:
    """Returns the items of a list as written: groups (separated by `or`, `and`, a semicolon or wide space) of items
    (separated by commas). Brackets are not split."""
    text = unwrapped(text)
    around = _around(text)
    if around is not None and not _leaves_out(around):
        text = around[1]
    text = _OR_AND.sub(";", _QUAD.sub(";", _without_thousands(text)))
    groups = [_split(group, re.compile(",")) for group in _split(text, re.compile(";"))]
    kept = [[item for item in group if item.strip(" .:*_`$")] for group in groups]
    return [group for group in kept if group]


def alternatives(text: str) -> list[str]:
    """Returns the items of `1/2 or 0.5` or `x = 1/2 or x = 0.5`, up to four; none if anything other than `or` joins
    them, or if they have different names."""
    text = unwrapped(text)
    if _AND.search(text) or not _OR.search(text):
        return []
    found = items(text)
    names = {name for item in sum(found, []) if (name := item.rpartition("=")[0].strip(" $"))}
    one_each = 1 < len(found) <= 4 and all(len(group) == 1 for group in found)
    return [item for [item] in found] if one_each and len(names) < 2 else []


def _are_joined(between: str) -> bool:
    """Whether the text between two boxes makes them alternatives or parts of one expression, rather than a corrected
    answer."""
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
    """Returns the text before, in and after the box, or else the only formula; otherwise ("", text, ""). None: several
    boxes."""
    found = boxes(text)
    if len({inside for _, _, inside in found}) > 1:
        return None
    if found:
        return text[: found[0][0]], found[-1][2], text[found[-1][1] :]
    parts = text.replace("$$", "$").replace("\\$", "").split("$")
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else ("", text, "")


def _leaves_out(around: tuple[str, str, str]) -> bool:
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
    """Removes a clause after the only box that explains its content: `, where m and n are 2 and 3`."""
    found = boxes(text, outermost=True)
    if len(found) != 1:
        return text
    end = found[0][1]
    reason = _REASON.match(text, end)
    if not reason or _OTHERWISE.search(text, end) or not _REMARK.fullmatch(text[: found[0][0]]):
        return text
    return text[:end] + reason[1]


def _without_remarks(text: str) -> str:
    """Returns the only box of a text if beside it are only words other than `or`; else the text."""
    found = boxes(text, outermost=True)
    if len(found) != 1:
        return text
    begin, end, _ = found[0]
    return text[begin:end] if _REMARK.fullmatch(f"{text[:begin]} {text[end:]}") else text


def _without_box(text: str) -> str:
    for begin, end, inside in boxes(text)[:1]:
        return text[:begin] + inside + text[end:]
    return text


def _without_thousands(text: str) -> str:
    text = _NEGATIVE_SPACE.sub(",", text.replace("{,}", ","))
    text = text.replace("\\!", "").replace("\\,", "").replace("\\;", "")
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
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
