"""Normalizes an answer's text: DAPO's spelling, a more careful spelling, and the number that a spelling stands for. The
text is adversarial: it is bounded, processed by regular expressions and never evaluated. The removed parts follow
Minerva (arXiv 2206.14858, appendix D), the origin of DAPO's rule."""

import re
import unicodedata
from fractions import Fraction

MAX_NUMBER_CHARS = 100  # a longer number is compared as a string

# DAPO's rule. The order matters, because each step works on the result of the one before.
_DAPO_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_DAPO_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_DAPO_UNWRAPPED = tuple(re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline"))
_DAPO_BOXED = re.compile(r"\\boxed\{(.*)\}")
_DAPO_FRAC = re.compile(r"(frac)([^{])(.)")
_DAPO_SQRT = re.compile(r"(sqrt)([^{])")

_SPECIAL_TOKENS = re.compile(
    r"(?:(?:<\|[^<>|]{1,40}\|>|<\uff5c[^<>\uff5c]{1,40}\uff5c>|</?s>|<(?:eos|pad|end_of_turn)>|</(?!s>)[a-z]{1,20}>)\s*+)++$"
)
_BOXED = re.compile(r"\\(?:f?boxed|fbox)\s*\{")
# Without a brace TeX boxes one character. We take all digits of a number, but not a part of a formula.
_BARE_BOX = re.compile(
    r"\\(f?boxed|fbox)(?:\s*([0-9]++)|\s+([A-Z]))"
    r"(?![0-9A-Za-z]|[.,][0-9]|\s*(?:[-+*/^_=({\u2212]|\\(?![)\]\\]|end(?![A-Za-z]))))"
)
_LEFT_OPERATOR = re.compile(r"(?:[-+/^\u2212]|\\(?:pm|mp|times|cdot|div|sqrt)\s*\{?)[\s({]*$")
RIGHT_OPERATOR = re.compile(r"\s*(?:[-+/\u2212]|\^(?!\s*\{?\s*\\circ)|\\(?:times|cdot|div))")
# A box inside an expression, 1+\boxed{5}, is not the answer. A dash before it may be a list's.
_BOX_IN_EXPRESSION = re.compile(
    r"(?:[0-9)}]\s*(?:-|\*(?!\*))|[0-9A-Za-z)}]\s*[+/^]|[\u00d7\u00f7\u00b7\u22c5\u00b1]|\\(?:times|cdot|div|pm|mp|sqrt|frac)\s*\{?)"
    r"\s*\\f?boxed|\\f?boxed\s*\{[^{}]*\}\s*"
    r"(?:-\s*[0-9\\(]|(?:[+/^]|\*(?!\*))\s*[0-9A-Za-z\\({]|[\u00d7\u00f7\u00b7\u22c5\u00b1]|\\(?:times|cdot|div|pm|mp)(?![A-Za-z]))"
)
# An inequality in the clause before the last `=`, 3 < x = 5: not a named value.
_INEQUALITY = re.compile(r"(?:[<>]|\\(?:leq?|geq?|lt|gt|neq?)(?![A-Za-z]))(?:(?![A-Za-z]{2})[^,;:])*$")
_EXPONENT = re.compile(r"\^\s*\{?\s*[23]\s*\}?")

_REMOVED = re.compile(
    r"\\[,!$()\[\]]|\$|\\(?:left|right|displaystyle)(?![a-zA-Z])"  # thin space, math delimiters
    r"|\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|°(?!\s*[0-9])"
)
_DOLLAR_INSIDE = re.compile(r"(?<=[0-9])\s*(?<!\\)\$+\s*(?=\.?[0-9])")  # 4 $2$ is not 42
_SPACE = re.compile(r"\\[;: ]|\\q?quad(?![a-zA-Z])|~")
_WRAPPER = re.compile(
    r"\\(?:text|textnormal|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}"
)
_WORD = (
    r"(?:dollars?|cents?|usd|percent|degrees?|units?|square|sq\.?|cubic|cu\.?|mm|[cg]m|km|(?:milli|centi|kilo)?meters?|inch(?:es)?"
    r"|feet|foot|ft|yards?|miles?|mph|(?:kilo)?grams?|kg|pounds?|lbs?|ounces?|oz|lit(?:er|re)s?|sec(?:ond)?s?"
    r"|min(?:ute)?s?|h(?:ou)?rs?|days?|weeks?|months?|years?|points?|ways?|integers?|people|students?|pages?"
    r"|digits?|edges?|meals?|multiples)"
)
# Text that makes a formula part of something larger: $5$ million, $5$x, e$5$, x > $5$.
_SCALE = r"(?:hundred|thousand|million|billion|trillion)(?![A-Za-z])"
_GOES_ON = re.compile(rf"(?:\s|\\[!,;: ])*{_SCALE}|[A-Za-z!]|\\[A-Za-z]", re.IGNORECASE)
_BEGAN_BEFORE = re.compile(r"(?<![A-Za-z])[A-Za-z]$|(?:[<>]|\\(?:leq?|geq?|neq?))\s*$")
# Single letters are not units here: in `3m` they are more often a variable.
_UNIT = re.compile(rf"(?<=[0-9}})]) ?(?:\\?%|{_WORD}(?: (?:per )?{_WORD})*(?: ?\^ ?\{{?[23]\}}?)?)$", re.IGNORECASE)
_SCRIPT = re.compile(r"([_^]) ?\{ ?([0-9A-Za-z]) ?\}")
_SQRT = re.compile(r"\\sqrt ?([0-9])")
_FRAC = re.compile(r"\\frac ?(?:\{([^{}]*)\}|([0-9])) ?(?:\{([^{}]*)\}|([0-9]))")
_BLACKBOARD = re.compile(r"\\(?:mathbb|Bbb) ?(?:\{ ?([A-Z]) ?\}|([A-Z]))")
_ANY_BINOM = re.compile(r"\\[dt]binom(?![a-zA-Z])")
_ANY_FRAC = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
# Only visible white space: a control character must not vanish (5<US>2 is not 52).
_WHITE = re.compile(r"[ \t\n\u00a0\u2000-\u200a\u202f\u3000]+")

_DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_PLAIN = re.compile(rf"[+-]?{_DECIMAL}")
_MIXED = re.compile(r"([+-]?)(?:([0-9]+) )?([0-9]+)/([0-9]+)")
_POWER_OF_TEN = re.compile(
    rf"(?:([+-]?{_DECIMAL})(?:\\times|\\cdot|[*\u00d7\u00b7\u22c5])|([+-]?))10\^(?:([0-9])|\{{([+-]?[0-9]{{1,2}})\}})"
)  # 1.5\times10^3, 10^3
_GROUP_COMMA = re.compile(r"(?<![0-9,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_GROUP = re.compile(r"\{((?:[^{}]|\{[^{}]*\})*+)(?<!\\)\}")
_DASH = re.compile(r"\s*[\u2010-\u2013\ufe63\uff0d]\s*(?=[0-9.\\])")  # as a sign
_IN_PARENTHESES = re.compile(r"\(([^(),]*)\)")
_CHOICE = re.compile(r"\([A-Z]\)")
_LATEX = re.compile(r"([+-]?)([0-9]+)?\\frac\{([+-]?[0-9]+)\}\{([+-]?[0-9]+)\}")


def dapo_spelling(text: str) -> str:
    """Returns the answer as DAPO's rule spells it (verl, reward_score/math_dapo.py), or "" if that would lose a part.
    Two differences: commas are removed from thousands only (DAPO's rule reads `1,2` as 12), and a formula must be the
    whole answer: `-$42$`, `$41$ $42$` and `$1$+1` give "", where DAPO's rule keeps the formula alone."""
    text = text.rpartition("=")[2]
    if not _formula_is_all(text):
        return ""
    for old, new in _DAPO_REPLACED:
        text = text.replace(old, new)
    for part in _DAPO_REMOVED:
        text = text.replace(part, "")
    first = text.split("$", 2)
    text = first[1] if len(first) == 3 else text
    if "\\" in text:
        for wrapper in _DAPO_UNWRAPPED:
            text = wrapper.sub(r"\1", text)
        text = _DAPO_BOXED.sub(r"\1", text)
    text = _DAPO_SQRT.sub(r"\1{\2}", _DAPO_FRAC.sub(r"\1{\2}{\3}", text)).replace("$", "")
    ends = text.strip().strip(",")
    if _GROUPED.fullmatch(ends) or ends.isdigit():
        text = ends.replace(",", "")
    return text.strip()


def _formula_is_all(text: str) -> bool:
    """Whether the first $formula$ of a text is the whole answer: no other formula, and no digit or operator next to
    it."""
    parts = text.replace("\\$", "").split("$")
    if len(parts) < 3:
        return True
    formula = parts[1].strip()
    if any(other.strip(" {}") not in ("", formula) for other in parts[3:-1:2]):
        return False
    around = parts[0::2] if len(parts) % 2 else [*parts[0::2], parts[-1]]  # the last dollar may open nothing
    if any(char.isdigit() for char in _EXPONENT.sub("", " ".join(around))):
        return False
    return not (_LEFT_OPERATOR.search(parts[0]) or RIGHT_OPERATOR.match(parts[2]))


def careful_spelling(text: str, *, right_side: bool = True) -> str:
    """Returns a normal form without math delimiters, text commands, units, spaces, markup, final dot, braces around the
    whole text, or parentheses around a choice."""
    text = formula(text, right_side=right_side)
    if _PLAIN.fullmatch(text):
        return text
    text = _DOLLAR_INSIDE.sub("\ufffd", text)
    text = without_units(_SPACE.sub(" ", _REMOVED.sub("", text)).replace("{,}", ","))
    text = _FRAC.sub(r"\\frac{\1\2}{\3\4}", _SQRT.sub(r"\\sqrt{\1}", _SCRIPT.sub(r"\1\2", text)))
    if "bb" in text or "binom" in text:
        text = _ANY_BINOM.sub(r"\\binom", _BLACKBOARD.sub(r"\\mathbb{\1\2}", text))
    text = _trim(text if _MIXED.fullmatch(_ungrouped(text)) else text.replace(" ", ""))
    while "," not in text and (group := _GROUP.fullmatch(text)):
        text = group[1]
    return text[1] if _CHOICE.fullmatch(text) else text


def formula(text: str, *, right_side: bool = True) -> str:
    """Returns the answer part of a text (`5` of `x = 5`, of `it is $5$ indeed` and of `\\boxed{5}`), printable, on one
    line and without markup around it. right_side: of an equation, take the part after the last `=`."""
    text = _WHITE.sub(" ", text.strip("\r")).replace("\u2212", "-")
    text = _trim(printable(without_tokens(text)))
    if _PLAIN.fullmatch(text):
        return text
    side = _right_side(text) if right_side else text
    contents = [] if _BOX_IN_EXPRESSION.search(side) else boxed(side)
    text = contents[-1] if contents else side
    text = _inside_dollars(text)
    text = _right_side(text) if right_side else text
    return f"-{text[sign.end() :]}" if (sign := _DASH.match(text)) else text


def without_tokens(text: str) -> str:
    return _SPECIAL_TOKENS.sub("", text) if ">" in text[-12:] else text


def printable(text: str) -> str:
    """Replaces unprintable characters by U+FFFD: they must neither vanish (4<NUL>2 is not 42) nor reach a log or
    database."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "\ufffd" for char in text)


def without_units(text: str) -> str:
    """Removes commands around words and the unit after a number."""
    if "\\" in text:
        text = unwrapped(_ANY_FRAC.sub(r"\\frac", text))
    return _UNIT.sub("", _trim(_WHITE.sub(" ", text)))


def unwrapped(text: str) -> str:
    """Replaces \\text{...} and similar commands by their content."""
    for _ in range(3):  # \textbf{\text{...}}: deeper nesting is not an answer
        text = _WRAPPER.sub(r" \1 ", text)
    return text


def braced(text: str) -> str:
    """Adds braces to boxes without them: `\\boxed{2}` for `\\boxed 2`."""
    return _BARE_BOX.sub(r"\\\1{\2\3}", text) if "box" in text else text


def boxed(text: str) -> list[str]:
    """Returns the contents of the \\boxed{...} of a text, in order, after `braced`. Of nested boxes the innermost
    counts; unclosed and empty ones are ignored."""
    return [inside for _, _, inside in boxes(braced(text))]


def boxes(text: str, *, outermost: bool = False) -> list[tuple[int, int, str]]:
    """Returns the boxes of `boxed` as (begin, end, content); outermost: begin and end are those of the outermost
    enclosing box."""
    begins = {match.end(): match.start() for match in _BOXED.finditer(text)} if "box" in text else {}
    found: list[tuple[int, int, str]] = []
    opened: list[tuple[int, int]] = []  # for every open brace: start of its content, number of boxes before it
    for place, char in enumerate(text if begins else "", 1):
        if char == "{":
            opened.append((place, len(found)))
        elif char == "}" and opened:
            start, before = opened.pop()
            inside = text[start : place - 1]
            if start not in begins:
                continue
            if len(found) > before and outermost:
                found[before:] = [(begins[start], place, inner) for _, _, inner in found[before:]]
            elif len(found) == before and not inside.isspace() and inside:
                found.append((begins[start], place, inside))
    return found


def line_of_last_box(text: str) -> str:
    """Returns the line or lines of the last box; "" if there is none."""
    found = boxes(text, outermost=True)
    if not found:
        return ""
    start = end = found[-1][1]
    for begin, close, _ in reversed(found):
        if close >= start:  # extends into the line
            start = text.rfind("\n", 0, begin) + 1
    return text[start:end] + text[end:].partition("\n")[0]


def number(text: str) -> Fraction | None:
    """Returns the exact value of an integer, decimal, fraction or mixed number in a careful spelling; else None. A
    fraction with an integer value, 84/2, is an unevaluated division: None. Powers are only accepted as scientific
    notation with exponents of up to two digits, because `1e999999999` would have to be expanded."""
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if power := _POWER_OF_TEN.fullmatch(text):
        return Fraction(power[1] or f"{power[2]}1") * Fraction(10) ** int(power[3] or power[4])
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    if _PLAIN.fullmatch(text):
        return Fraction(text)
    text = _ungrouped(text)
    match = _MIXED.fullmatch(text) or _LATEX.fullmatch(text)
    if match is None or int(match[4]) == 0 or (match[2] and int(match[4]) < 0):
        return None
    sign, whole, top, bottom = match.groups()
    value = int(whole or 0) + Fraction(int(top), int(bottom))
    if value.denominator == 1:
        return None
    return -value if sign == "-" else value


def _ungrouped(text: str) -> str:
    return _GROUP_COMMA.sub(lambda group: group[0].replace(",", ""), text) if "," in text else text


def enclosed_number(text: str) -> Fraction | None:
    enclosed = _IN_PARENTHESES.fullmatch(text)
    return number(enclosed[1]) if enclosed else None


def plain_number(text: str) -> Fraction | None:
    return Fraction(text) if len(text) <= MAX_NUMBER_CHARS and _PLAIN.fullmatch(text) else None


def _trim(text: str) -> str:
    return text.lstrip(' *_`"').rstrip(' *_`".,;:。．')


def _inside_dollars(text: str) -> str:
    """Returns the formula of `the answer is $5$ indeed`; the whole text if the formula is not the whole answer."""
    text = text.replace("$$", "$")
    parts = text.replace("\\$", "").split("$")
    if len(parts) != 3 or not _formula_is_all(text):
        return text
    before, inside, behind = parts
    plus = bool(before.strip()) and inside.lstrip().startswith("+")
    return text if plus or _BEGAN_BEFORE.search(before) or _GOES_ON.match(behind) else inside


def _right_side(text: str) -> str:
    """Returns `5` of `x = 2 + 3 = 5`; the whole text if the last `=` is in braces or after an inequality."""
    left, _, right = text.rpartition("=")
    return right if right.count("{") == right.count("}") and not _INEQUALITY.search(left) else text


MAX_GROWTH = 300  # characters; a text that would grow by more stays unchanged

_COMMANDS = """
α alpha β beta γ gamma δ delta ε epsilon ζ zeta η eta θ theta κ kappa λ lambda μ mu µ mu ν nu ξ xi π pi ρ rho σ sigma
τ tau φ phi ϕ phi χ chi ψ psi ω omega Γ Gamma Δ Delta Θ Theta Λ Lambda Ξ Xi Π Pi Σ Sigma Φ Phi Ψ Psi Ω Omega
× times · cdot ⋅ cdot ∙ cdot ÷ div ± pm ∓ mp ∞ infty ≤ le ≥ ge ≦ le ≧ ge ⩽ le ⩾ ge ≠ ne ≈ approx ≅ cong ≡ equiv
∪ cup ∩ cap ∖ setminus ∈ in ∉ notin ∅ emptyset ∠ angle △ triangle ⊥ perp
""".split()
_PLAIN_SIGNS = dict(zip("（）［］：＝＋－＜＞％“”′−", '()[]:=+-<>%""\'-', strict=True)) | {
    "，": ", ",
    "、": ", ",
    "；": "; ",
}
_SIGNS = {sign: f"\\{name}" for sign, name in zip(_COMMANDS[::2], _COMMANDS[1::2], strict=True)} | _PLAIN_SIGNS
_SIGNS |= {sign: f"\\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)}
_SIGN = re.compile(f"([{''.join(map(re.escape, _SIGNS))}])(?=([A-Za-z])?)")
_FRACTION = re.compile("[¼-¾⅐-⅞]")
_SLASH = "\u2044"  # fraction slash
_BASE = r"(?<=[A-Za-z0-9)}\]'°Α-Ωα-ω])"  # a script needs a base
_SUPERSCRIPT = re.compile(rf"{_BASE}[⁰¹²³⁴-⁹⁺⁻⁽⁾ⁿⁱ]+")
_INDEX = re.compile(rf"{_BASE}[₀-₉₊₋₍₎ₙₖₓ]+")
_ROOTS = {"√": "", "∛": "[3]", "∜": "[4]"}
_ROOT = re.compile(
    r"([√∛∜])\s*(?:([0-9]++(?:\.[0-9]++)?|\\frac\{[0-9]+\}\{[0-9]+\}|\\[A-Za-z]+|[A-Za-z])"
    r"|\(((?:[^()]|\([^()]*\))*+)\)|\{([^{}]*)\})"
)


def as_latex(text: str) -> str:
    if text.isascii():
        return text
    made = _FRACTION.sub(lambda match: f"\\frac{{{_plain(match[0]).replace(_SLASH, '}{')}}}", text)
    made = _SUPERSCRIPT.sub(lambda match: f"^{{{_plain(match[0])}}}", made)
    made = _INDEX.sub(lambda match: f"_{{{_plain(match[0])}}}", made)
    made = _SIGN.sub(_command, made)
    made = _ROOT.sub(lambda match: f"\\sqrt{_ROOTS[match[1]]}{{{match[2] or match[3] or match[4] or ''}}}", made)
    return made if len(made) <= len(text) + MAX_GROWTH else text


def _plain(signs: str) -> str:
    return unicodedata.normalize("NFKC", signs).replace("\u2212", "-")


def _command(match: re.Match[str]) -> str:
    written = _SIGNS[match[1]]
    return f"{written} " if match[2] and written[-1].isalpha() else written


_UNIT_NAMES = """
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
_UNITS = {word: names[0] for names in map(str.split, filter(None, _UNIT_NAMES)) for word in names}
_SPEED = {"mph": ("mi", "/", "h"), "kph": ("km", "/", "h"), "kmh": ("km", "/", "h")}
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_WRAPPED = re.compile(r"\\(?:text|textnormal|textrm|textbf|mathrm|mbox|operatorname)(?![A-Za-z])")
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree|°")
_UNIT_POWER = re.compile(r"\s*\^\s*\{?\s*([23])\s*\}?")
_UNIT_SIGN = re.compile(r"[A-Za-z%$°¢]")
_LAST_DIGIT = re.compile(r"[0-9][)}\]]*")
_UNIT_WORD = re.compile(r"[A-Za-z¢]+|[%/]|\u00b2|\u00b3")
_UNIT_TEXT = re.compile(r"[A-Za-z¢%/²³\s.,~$*\\;:!}]*")


def unit(text: str) -> str:
    """Returns the unit after the last number of an answer in a normal form, `ft2` for square feet; "" for none."""
    if not _UNIT_SIGN.search(text):
        return ""
    wrapped = bool(_WRAPPED.search(text))
    whole = _UNIT_POWER.sub(lambda match: "²³"[int(match[1]) - 2], _DEGREE.sub(" degrees ", unwrapped(formula(text))))
    *_, last = [None, *_LAST_DIGIT.finditer(whole)]
    behind = whole[last.end() :] if last else whole
    return _read_unit(behind, wrapped) or ("dollar" if "\\$" in text or text.count("$") == 1 else "")


def _read_unit(text: str, wrapped: bool) -> str:
    """wrapped: the text is in a text command, so a single letter is a unit and not a factor."""
    if not _UNIT_TEXT.fullmatch(text):
        return ""
    parts: list[str] = []
    power = ""
    for word in _UNIT_WORD.findall(text):
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
