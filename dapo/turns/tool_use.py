"""Gives the policy a calculator and, optionally, a Python interpreter, which it may call several times.

    policy: <calc>17*23</calc>               tool: <result>391</result>   policy: ... Answer: 391
    policy: <python>print(2**9)</python>     tool: <result>512</result>   policy: ... Answer: 512

Text between `<calc>` and `</calc>` is parsed as arithmetic and never run as a program. Programs run separately in the
sandbox (`dapo.sandbox`).
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from dapo.turns.interpreter import interpret
from dapo.turns.protocol import Generate, Trajectory
from dapo.types import Prompt, Sampling

RUNS_PROGRAMS = "python"  # the argument that enables running the model's programs
BEGIN, END = "<calc>", "</calc>"
PYTHON_BEGIN, PYTHON_END = "<python>", "</python>"
MAX_CHARS, MAX_DIGITS = 200, 60  # of an expression, and of its result
MAX_EXPONENT = 200
# No keywords: Python's parser warns on standard error of text such as `1if`.
_WRITTEN = re.compile(r"[\s0-9a-fA-FxXoO_.+\-*/%()]*")

_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


async def rollout(
    prompt: Prompt,
    generate: Generate,
    sampling: Sampling,
    *,
    max_calls: int = 4,
    python: bool = False,
    max_result_chars: int = 400,
) -> Trajectory:
    """Returns the text of all turns, including results. After `max_calls` the policy gets no more results. python:
    whether there is an interpreter too. max_result_chars: limit of a program's output."""
    text, given = "", ()
    as_text = {"add_special_tokens": False, "split_special_tokens": True}  # a program may print special tokens
    for _ in range(max_calls):
        turn = await generate(given, stop=(END, PYTHON_END) if python else END)
        text += turn.text
        # The token that completes a stop string may contain more text after it.
        ends = [end for end in (END, PYTHON_END)[: 1 + python] if end in turn.text]
        if turn.finish_reason != "stop" or not ends:
            return Trajectory(text=text)
        end = min(ends, key=turn.text.index)
        said = turn.text[: turn.text.index(end)]
        if end == END:
            result = calculate(said.rpartition(BEGIN)[2])
        else:
            result = await interpret(said.rpartition(PYTHON_BEGIN)[2], max_result_chars)
        shown = f"<result>{result}</result>"
        text, given = text + shown, tuple(generate.tokenizer(shown, **as_text)["input_ids"])
    return Trajectory(text=text + (await generate(given)).text)


def calculate(expression: str) -> str:
    """Returns the exact value (integer or fraction) of an expression of numbers, `+ - * / // % **` and brackets; or
    `error` with the reason.

    >>> calculate("17*23"), calculate("1/3 + 1/6"), calculate("2**10"), calculate("1/0"), calculate("x")
    ('391', '1/2', '1024', 'error: division by zero', 'error: not arithmetic')
    """
    if len(expression) > MAX_CHARS:
        return "error: too long"
    if not _WRITTEN.fullmatch(expression):
        return "error: not arithmetic"
    try:
        value = str(_value(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return "error: not arithmetic"
    return value if len(value) <= MAX_DIGITS else "error: too long"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            exponent = _value(right)
            if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
                raise ValueError("exponent")
            return _bounded(Fraction(_value(left) ** int(exponent)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
    raise ValueError("not arithmetic")


def _bounded(value: Fraction) -> Fraction:
    """Raises ValueError for numbers that are too large to compute with quickly."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 4096:
        raise ValueError("too large")
    return value
