"""Formulas of docstrings as MathML, which browsers draw without scripts or fonts of the site's own.

The part of LaTeX that this package's docstrings use; anything else is an error of the build.
"""

from __future__ import annotations

import re
from html import escape

OPERATORS = {
    "leftarrow": "←", "le": "≤", "ge": "≥", "sim": "∼", "cdot": "·", "odot": "⊙", "top": "⊤",
    "langle": "⟨", "rangle": "⟩", "lVert": "‖", "rVert": "‖", "sum": "∑", "in": "∈", "times": "×",
    "{": "{", "}": "}", "mid": "∣", "to": "→", "infty": "∞", "partial": "∂", "nabla": "∇",
}  # fmt: skip
LETTERS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ϵ", "eta": "η",
    "theta": "θ", "kappa": "κ", "lambda": "λ", "mu": "μ", "xi": "ξ", "rho": "ρ", "sigma": "σ",
    "tau": "τ", "phi": "ϕ", "omega": "ω", "Delta": "Δ", "Omega": "Ω", "Sigma": "Σ", "ell": "ℓ",
}  # fmt: skip
FUNCTIONS = ("max", "min", "tanh", "ln", "log", "exp")
ACCENTS = {"bar": "¯", "overline": "¯", "hat": "^", "tilde": "~"}
SPACES = {",": "0.17em", ";": "0.28em", " ": "0.28em", "quad": "1em", "qquad": "2em", "!": "0"}
SIZES = ("big", "Big", "bigl", "bigr", "Bigl", "Bigr", "left", "right", "textstyle")
CALLIGRAPHIC = {"N": "𝒩", "L": "ℒ"}
SCRIPTS = {"^": "msup", "_": "msub"}
STRETCHING = "()[]{}‖|⟨⟩"

TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|\S", re.S)


class FormulaError(ValueError):
    """A formula uses what this module does not know."""


def to_mathml(latex: str, display: bool = False) -> str:
    r"""A formula as a ``<math>`` element on one line; ``&`` and ``\\`` make rows of columns.

    Raises:
        FormulaError: It has a command that this module does not know.

    Example:
        >>> to_mathml("a^2")
        '<math><msup><mi>a</mi><mn>2</mn></msup></math>'
    """
    rows = [re.split(r"(?<!\\)&", row) for row in re.split(r"\\\\", latex)]
    if len(rows) == 1 and len(rows[0]) == 1:
        body = "".join(_elements(latex))
    else:
        cells = ("".join(f"<mtd>{''.join(_elements(c))}</mtd>" for c in row) for row in rows)
        body = "".join(f"<mtr>{row}</mtr>" for row in cells)
        body = f"<mtable>{body}</mtable>"
    attribute = ' display="block"' if display else ""
    return f"<math{attribute}>{body}</math>"


def _elements(latex: str) -> list[str]:
    """All of a formula's elements, with what is above and below them."""
    return _until(TOKEN.findall(latex)[::-1], "")


def _until(tokens: list[str], end: str) -> list[str]:
    """The elements up to a closing brace, or all; `tokens` are taken from their end."""
    found: list[str] = []
    while tokens:
        token = tokens.pop()
        if end and token == end:
            return found
        if token.isdigit() and found and found[-1].startswith("<mn>"):
            found[-1] = found[-1].replace("</mn>", f"{token}</mn>")
        elif token in SCRIPTS:
            found.append(_scripted(found.pop() if found else "<mrow></mrow>", token, tokens))
        else:
            found.append(_element(token, tokens))
    if end:
        raise FormulaError(f"a formula lacks {end!r}")
    return found


def _scripted(base: str, mark: str, tokens: list[str]) -> str:
    """`base` with an exponent, an index, or both."""
    scripts = {mark: _argument(tokens)}
    if tokens and tokens[-1] in SCRIPTS and tokens[-1] != mark:
        other = tokens.pop()
        scripts[other] = _argument(tokens)
    name = "msubsup" if len(scripts) == 2 else SCRIPTS[mark]
    return f"<{name}>{base}{scripts.get('_', '')}{scripts.get('^', '')}</{name}>"


def _argument(tokens: list[str]) -> str:
    """What the next command, letter, digit or group in braces stands for, as one element."""
    if not tokens:
        raise FormulaError("a formula ends too early")
    token = tokens.pop()
    return _row(_until(tokens, "}")) if token == "{" else _element(token, tokens)


def _row(elements: list[str]) -> str:
    return elements[0] if len(elements) == 1 else f"<mrow>{''.join(elements)}</mrow>"


def _element(token: str, tokens: list[str]) -> str:
    if token == "{":
        return _row(_until(tokens, "}"))
    if token.startswith("\\"):
        return _command(token[1:], tokens)
    if token.isdigit():
        return f"<mn>{token}</mn>"
    if token.isalpha():
        return f"<mi>{token}</mi>"
    return _operator("−" if token == "-" else token)


def _command(name: str, tokens: list[str]) -> str:
    if name in LETTERS:
        return f"<mi>{LETTERS[name]}</mi>"
    if name in OPERATORS:
        return _operator(OPERATORS[name])
    if name in FUNCTIONS:
        space = _command(",", tokens) if name in ("ln", "log") else ""
        return f"<mi>{name}</mi>{space}"
    if name in SPACES:
        return f'<mspace width="{SPACES[name]}"></mspace>'
    if name in SIZES:
        return ""
    if name in ACCENTS:
        return f'<mover accent="true">{_argument(tokens)}<mo>{ACCENTS[name]}</mo></mover>'
    if name == "sqrt":
        return f"<msqrt>{_argument(tokens)}</msqrt>"
    if name in ("frac", "tfrac"):
        above = _argument(tokens)
        return f"<mfrac>{above}{_argument(tokens)}</mfrac>"
    if name in ("mathrm", "operatorname", "text", "mathcal"):
        letters = re.sub(r"<[^>]+>", "", _argument(tokens))
        return (
            f"<mi>{CALLIGRAPHIC[letters]}</mi>"
            if name == "mathcal"
            else f"<mtext>{letters}</mtext>"
        )
    raise FormulaError(f"unknown command \\{name} in a formula")


def _operator(sign: str) -> str:
    attribute = ' stretchy="false"' if sign in STRETCHING else ""
    return f"<mo{attribute}>{escape(sign)}</mo>"
