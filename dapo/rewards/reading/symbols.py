"""Writes Unicode mathematics as LaTeX: 4π as 4\\pi, √2 as \\sqrt{2}, x² as x^{2}, ½ as \\frac{1}{2}. Only unambiguous
signs are converted. Digits of other scripts, look-alike letters, invisible characters and other slashes and dots stay:
what a user cannot tell apart must not become a number."""

import re
import unicodedata

MAX_GROWTH = 300  # characters; a text that would grow by more stays unchanged

_COMMANDS = """
α alpha β beta γ gamma δ delta ε epsilon ζ zeta η eta θ theta κ kappa λ lambda μ mu µ mu ν nu ξ xi π pi ρ rho σ sigma
τ tau φ phi ϕ phi χ chi ψ psi ω omega Γ Gamma Δ Delta Θ Theta Λ Lambda Ξ Xi Π Pi Σ Sigma Φ Phi Ψ Psi Ω Omega
× times · cdot ⋅ cdot ∙ cdot ÷ div ± pm ∓ mp ∞ infty ≤ le ≥ ge ≦ le ≧ ge ⩽ le ⩾ ge ≠ ne ≈ approx ≅ cong ≡ equiv
∪ cup ∩ cap ∖ setminus ∈ in ∉ notin ∅ emptyset ∠ angle △ triangle ⊥ perp
""".split()
_PLAIN = dict(zip("（）［］：＝＋－＜＞％“”′−", '()[]:=+-<>%""\'-', strict=True)) | {"，": ", ", "、": ", ", "；": "; "}
_SIGNS = {sign: f"\\{name}" for sign, name in zip(_COMMANDS[::2], _COMMANDS[1::2], strict=True)} | _PLAIN
_SIGNS |= {sign: f"\\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)}
_SIGN = re.compile(f"([{''.join(map(re.escape, _SIGNS))}])(?=([A-Za-z])?)")
_FRACTION = re.compile("[¼-¾⅐-⅞]")
_SLASH = "\u2044"  # fraction slash
_BASE = r"(?<=[A-Za-z0-9)}\]'°Α-Ωα-ω])"  # a script needs a base
_POWER = re.compile(rf"{_BASE}[⁰¹²³⁴-⁹⁺⁻⁽⁾ⁿⁱ]+")
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
    made = _POWER.sub(lambda match: f"^{{{_plain(match[0])}}}", made)
    made = _INDEX.sub(lambda match: f"_{{{_plain(match[0])}}}", made)
    made = _SIGN.sub(_command, made)
    made = _ROOT.sub(lambda match: f"\\sqrt{_ROOTS[match[1]]}{{{match[2] or match[3] or match[4] or ''}}}", made)
    return made if len(made) <= len(text) + MAX_GROWTH else text


def _plain(signs: str) -> str:
    return unicodedata.normalize("NFKC", signs).replace("\u2212", "-")


def _command(match: re.Match[str]) -> str:
    written = _SIGNS[match[1]]
    return f"{written} " if match[2] and written[-1].isalpha() else written
