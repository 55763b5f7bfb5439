"""Hostile answers to stand after a label or in a box: per class, pairs of the answer and a ground truth it must fail.

They hang, fill memory or overflow a naive verifier, or are read as a number that they are not.
"""

import random
from collections.abc import Callable

Pairs = list[tuple[str, str]]

SYMBOLIC = ("\\frac{\\pi}{2}", "x^2+1", "2\\sqrt{3}", "e^{2}", "\\frac{x+1}{x-1}", "(1,2)", "[0,1)")
DIGIT_ZEROS = (0x660, 0x966, 0x9E6, 0xE50, 0xFF10, 0x1D7CE, 0x1D7D8, 0x2080, 0x17E0)  # first digits of other scripts
CIRCLED = "\u24ea" + "".join(chr(0x2460 + i) for i in range(9))
SUPERSCRIPT = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"


def any_truth(rng: random.Random, answers: list[str]) -> Pairs:
    """Numbers and symbolic truths: with the latter alone a symbolic verifier looks at the answer at all."""
    truths = [str(rng.randrange(11, 9999)), rng.choice(SYMBOLIC)]
    return [(answer, truths[index % 2]) for index, answer in enumerate(answers)] + [
        (answer, truths[1 - index % 2]) for index, answer in enumerate(answers)
    ]


def power_towers(rng: random.Random) -> Pairs:
    base, height = rng.randrange(3, 10), rng.randrange(4, 13)
    latex = f"{base}^{{" * height + str(base) + "}" * height
    symbolic = "x^{" * height + "x" + "}" * height
    answers = ["9**9**9**9", "**".join([str(base)] * height), latex, "^".join(["9"] * height), symbolic]
    answers += [
        f"{base}^{{{base}^{{{base}^{{{base}^{{x}}}}}}}}",
        "2^{2^{2^{2^{2^{2}}}}}",
        "((9^9)^9)^9",
        "10^{10^{10}}",
    ]
    return any_truth(rng, answers)


def factorials(rng: random.Random) -> Pairs:
    n = rng.randrange(10**6, 10**9)
    answers = ["100000000!", f"{n}!", "((10!)!)!", f"\\Gamma({n})", f"{n}!!", "9!!!!!!!!!!!!", f"\\log({n}!)"]
    answers += [f"{n}! \\bmod 7", f"\\frac{{x}}{{{n}!}}", f"factorial({n})"]
    return [*any_truth(rng, answers), (f"\\frac{{{n}!}}{{{n - 1}!}}", str(n)), (f"{n}!/{n - 1}!", str(n))]


def huge_exponents(rng: random.Random) -> Pairs:
    n, small = rng.randrange(10**8, 10**11), rng.randrange(200, 900)
    answers = [f"10^{{{n}}}", f"1e{n}", f"Fraction('1e{n}')", "Fraction('1e999999999')", "1E+999999999", f"2**{n}"]
    answers += [
        f"1E+{n // 1000}",
        f"(x+1)^{{{n}}}",
        f"(x+y+z+1)^{{{small}}}",
        f"x^{{10^{{{n}}}}}",
        f"\\sqrt[{n}]{{2}}",
        "1/1e-999999999",
    ]
    answers += [f"(1+10^{{-9}})^{{{n}}}", f"(1+\\sqrt{{2}})^{{{small}}}", f"10^{{-{n}}}", f"e^{{i \\pi {n}}}"]
    return [*any_truth(rng, answers), (f"2^{{{n}}} \\bmod 1009", str(pow(2, n, 1009)))]


def binomials(rng: random.Random) -> Pairs:
    n = rng.randrange(10**6, 10**9)
    answers = [f"\\binom{{{n}}}{{{n // 2}}}", f"{{{n} \\choose {n // 2}}}", f"\\dbinom{{{n}}}{{{n // 3}}}"]
    answers += [f"C({n},{n // 2})", f"binomial({n}, {n // 2})", "\\binom{2^{30}}{2^{29}}", f"\\tbinom{n}{n}"]
    return [*any_truth(rng, answers), (f"\\binom{{{n}}}{{1}}", str(n)), (f"\\binom{{{n}}}{{{n - 1}}}", str(n))]


def nested(rng: random.Random) -> Pairs:
    """Nests a wrong number, so that a verifier which gets through has no excuse either."""
    wrong = rng.randrange(11, 9999)
    pairs = [("(", ")"), ("{", "}"), ("[", "]"), ("\\left(", "\\right)"), ("\\frac{1}{", "}"), ("\\sqrt{", "}")]
    pairs += [("-(", ")"), ("|", "|"), ("\\text{", "}"), ("\\boxed{", "}"), ("\\left|", "\\right|"), ("\\{", "\\}")]
    pairs += [("x_{", "}"), ("\\overline{", "}"), ("(1+", ")"), ("\\sin(", ")"), ("\\frac{", "}{2}")]
    depths = [60, 20, rng.randrange(21, 60), rng.randrange(300, 3000)]
    return [
        (opening * depth + str(wrong) + closing * depth, rng.choice([str(wrong + 1), "x^2+1", "2\\sqrt{3}"]))
        for depth in depths
        for opening, closing in pairs
    ]


def unbalanced(rng: random.Random) -> Pairs:
    wrong, k = rng.randrange(11, 9999), rng.randrange(3, 200)
    answers = [
        f"\\boxed{{{wrong}",
        "}" * k + "{" * k,
        "\\frac{1}{",
        "\\frac{{{",
        "(" * k,
        "\\left(" * (k // 6),
        "{" * k,
    ]
    answers += ["\\boxed{" * k, "\\text{" * k, "$" * (2 * k + 1), f"{wrong}" + "}" * k, "\\frac" * k, "\\sqrt{" * k]
    answers += ["\\begin{pmatrix} 1 & 2", "\\end{pmatrix}", f"\\left( {wrong} \\right]", "\\right)\\left(", "\\" * k]
    return [(answer, rng.choice([str(wrong + 1), *SYMBOLIC])) for answer in answers]


def matrices(rng: random.Random) -> Pairs:
    n = rng.randrange(20000, 90000)
    row = " & ".join(["1"] * 30)
    body = " \\\\ ".join([row] * rng.randrange(2, 30))
    answers = ["\\operatorname{eye}(30000)", f"\\operatorname{{zeros}}({n})", f"\\operatorname{{ones}}({n}, {n})"]
    answers += ["eye(30000)", f"\\det(\\operatorname{{eye}}({n}))", f"\\begin{{pmatrix}} {body} \\end{{pmatrix}}"]
    answers += [f"\\begin{{pmatrix}} 1 & 2 \\\\ 3 & 4 \\end{{pmatrix}}^{{{n}}}", f"\\operatorname{{diag}}({row})"]
    answers += ["\\begin{bmatrix} " + "& " * 90 + "\\end{bmatrix}", f"\\begin{{vmatrix}} {body} \\end{{vmatrix}}"]
    answers += [f"\\begin{{array}}{{{'c' * 90}}} 1 \\end{{array}}", f"\\operatorname{{eye}}({n})^{{-1}}"]
    return any_truth(rng, answers)


def huge_integers(rng: random.Random) -> Pairs:
    """Digits without end, and what `int` and `float` of Python read although nobody writes answers so."""
    t = rng.randrange(11, 9999)
    pairs = [(digit * k, str(t)) for k in (280, 5000, 50000) for digit in "91"]
    pairs += [(hex(t), str(t)), (bin(t), str(t)), (oct(t), str(t)), (f"{t / 10}e1", str(t)), (f"{t}e0", str(t))]
    pairs += [("_".join(str(t)), str(t)), (f"{t}j", str(t)), (f"{t}L", str(t)), (f"{t}.{'0' * 200}1", str(t))]
    pairs += [("0." + "9" * 250, "1"), ("1,000" + ",000" * 60, str(t)), ("1/" + "9" * 280, "0"), (f"{t}/0", "0")]
    pairs += [("-" + "0" * 250 + "1", "1"), ("1" + "0" * 280, "2\\sqrt{3}"), ("infinity", "\\infty"), ("1e400", "inf")]
    return pairs


def unevaluated(rng: random.Random) -> Pairs:
    a, b = rng.randrange(11, 90), rng.randrange(2, 90)
    t = a * b
    answers = [f"{t - 1}+1", f"{t - 1} + 1", f"{a}*{b}", f"{a} \\times {b}", f"{a}\\cdot {b}", f"\\sqrt{{{t * t}}}"]
    answers += [f"{2 * t}-{t}", f"{t}+0", f"--{t}", f"|-{t}|", f"{t}^1", f"{t}**1", f"\\sum_{{k=1}}^{{{t}}} 1"]
    answers += [f"\\lfloor {t}.5 \\rfloor", f"\\log_2(2^{{{t}}})", f"\\int_0^{{{t}}} 1 dx", f"({t - 1})+(1)", f"{t}-0"]
    answers += [f"\\max({t},1)", f"\\gcd({t},{t})", f"{t}//1", f"{t}%{t + 1}", f"-(-{t})", f"{t} \\bmod {t + 1}"]
    return [("1+1", "2"), *[(answer, str(t)) for answer in answers]]


def symbolic_bombs(rng: random.Random) -> Pairs:
    n, k = rng.randrange(10**7, 10**9), rng.randrange(5, 9)
    radicals = "".join(f"\\sqrt{{{p}+" for p in (2, 3, 5, 7, 11, 13, 17, 19)[:k]) + "1" + "}" * k
    factors = "".join(f"(x+{i})" for i in range(1, rng.randrange(12, 40)))
    answers = [f"\\sum_{{i=1}}^{{{n}}} \\frac{{1}}{{i}}", f"\\prod_{{i=1}}^{{{n}}} i", "\\int_0^1 x^{x^{x}} dx"]
    answers += ["\\sin(10^{10^{9}})", "\\lim_{x \\to 0} \\frac{\\sin(\\sin(\\sin(x)))}{x}+x^x", radicals, factors]
    answers += [f"\\cos(\\frac{{\\pi}}{{{n}}})", "\\log(" * k + "x" + ")" * k, f"\\frac{{\\sin({n}x)}}{{\\sin(x)}}"]
    answers += [
        "\\int e^{-x^2} \\sin(x^3) \\log(x) dx",
        f"x^{{{n}}}-y^{{{n}}}",
        "+".join(f"\\sqrt{{{i}}}" for i in range(2, 30)),
    ]
    answers += ["(\\sin x + \\cos x)^{90}", "\\frac{1}{1+" * k + "x" + "}" * k, f"\\tan(\\tan(\\tan({n})))", "x!^{x!}"]
    # Found by fuzzing with what a filter lets through: seconds to minutes for the library behind `math_verify`.
    answers += ["\\exp(100000000000037)/\\sqrt[5]{\\tan(i)}"]
    answers += [
        "\\sqrt{|\\begin{pmatrix} 0 & |\\pi| \\\\ n-0 & (0)^{n} \\end{pmatrix}|}",
        "\\log(|x^{99.5}n/i \\cdot 37|)",
    ]
    answers += ["\\cot((e)^{n} \\cdot \\sqrt{i}-\\sqrt{\\begin{pmatrix} i & i \\\\ x & n \\end{pmatrix}}) \\cdot 2^{x}"]
    return any_truth(rng, answers)


def unicode_digits(rng: random.Random) -> Pairs:
    t = str(rng.randrange(1011, 9999))
    scripts = ["".join(chr(zero + i) for i in range(10)) for zero in DIGIT_ZEROS] + [CIRCLED, SUPERSCRIPT]
    pairs = [("".join(script[int(char)] for char in t), t) for script in scripts]
    pairs += [(t[:-1] + script[int(t[-1])], t) for script in scripts]  # one digit is enough
    pairs += [
        ("\u00bd", "1/2"),
        ("\u2168", "9"),
        ("\u4e5d", "9"),
        ("\\frac{\u0661}{\u0662}", "1/2"),
        ("\u00be", "0.75"),
    ]
    return pairs + [("\uff10\uff0e\uff15", "0.5"), ("1\uff0f2", "0.5"), ("x\u00b2+1", "7"), ("\u2460", "1")]


def look_alikes(rng: random.Random) -> Pairs:
    a = rng.randrange(2, 9)
    pairs = [
        (f"{a}O", f"{a}0"),
        (f"{a}\u041e", f"{a}0"),
        (f"{a}\u03bf", f"{a}0"),
        (f"l{a}", f"1{a}"),
        (f"I{a}", f"1{a}"),
    ]
    pairs += [(f"{a}\u200b2", f"{a}2"), (f"{a}\u00ad2", f"{a}2"), (f"{a}\u20602", f"{a}2"), (f"{a}\ufeff2", f"{a}2")]
    pairs += [
        (f"\u202e2{a}", f"{a}2"),
        (f"\u20662{a}\u2069", f"{a}2"),
        (f"{a}2\u0301", f"{a}2"),
        (f"{a}\u066b5", f"{a}.5"),
    ]
    return pairs + [(f"{a}\u30fb5", f"{a}.5"), (f"\u02d7{a}", f"-{a}"), (f"{a}\u20442", f"{a}/2"), ("\u2028", "\u2028")]


def sentinels(rng: random.Random) -> Pairs:
    t = str(rng.randrange(11, 9999))
    words = ["[INVALID]", "None", "null", "nan", "NaN", "inf", "-inf", "undefined", "N/A", "unknown", "no answer", "?"]
    words += ["...", "\\text{undefined}", "TODO", "<answer>", "$Answer", "0", "-1", "error", "\\emptyset", "True"]
    return [("[INVALID]", "[INVALID]"), *[(word, t) for word in words], ("True", "1"), ("False", "0"), ("nan", "nan")]


def lists(rng: random.Random) -> Pairs:
    t = rng.randrange(11, 900)
    w = t + rng.randrange(1, 50)
    answers = [f"{w} or {t}", f"{w}, {t}", f"{w} and {t}", f"x={w} \\text{{ or }} x={t}", f"{w}; {t}", f"{t} or {w}"]
    answers += [f"\\{{{w}, {t}\\}}", f"[{t}, {w}]", f"({t},{w})", f"\\pm {t}", f"either {t} or {w}", f"{t}, {w}"]
    answers += [f"{t} (or {w})", f"x = {w}, y = {t}", f"{w} \\lor {t}", ", ".join(map(str, range(100)))]
    answers += [f"${w}$ or ${t}$", f"{w} \\quad {t}", f"{t}/{w} or {t}", f"{w}\\text{{ and }}{t}", f"{t},{w},{t}"]
    answers += [f"\\text{{{w} or }}{t}", f"x={w}\\text{{ and }}y={t}", f"{w},\\ {t}", f"x > {t}", f"{t} = {w}"]
    forms = (
        "{} or 5",
        "5 or {}",
        "{}, 5",
        "\\{{{}, 5\\}}",
        "\\pm {}",
        "x = 5 or x = {}",
        "({}, 5)",
        "{} \\text{{ and }} 5",
    )
    symbolic = [(form.format(truth), truth) for truth in SYMBOLIC[:5] for form in forms]
    return [*[(answer, str(t)) for answer in answers], *symbolic]


ANSWERS: dict[str, Callable[[random.Random], Pairs]] = {
    "power tower": power_towers,
    "factorial": factorials,
    "huge exponent": huge_exponents,
    "binomial": binomials,
    "deep nesting": nested,
    "unbalanced braces": unbalanced,
    "matrix": matrices,
    "huge integer": huge_integers,
    "unevaluated": unevaluated,
    "symbolic bomb": symbolic_bombs,
    "Unicode digits": unicode_digits,
    "look-alikes": look_alikes,
    "sentinel": sentinels,
    "answer list": lists,
}
