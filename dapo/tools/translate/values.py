"""Values that are known without running anything: literals, names and arithmetic of Python expressions."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
MAX_POWER = 64


class Unknown(Exception):
    """The value is known only when the program runs. The message is the part that is not known."""


def value_of(node: ast.AST, names: Mapping[str, ast.AST]) -> Any:
    """Returns the value of an expression. names: the expressions that names stand for. Raises Unknown."""
    try:
        return _value(node, names, 0)
    except (ArithmeticError, TypeError, ValueError, KeyError, IndexError, RecursionError):
        raise Unknown(ast.unparse(node)) from None


def _value(node: ast.AST, names: Mapping[str, ast.AST], depth: int) -> Any:
    def known(inner: ast.AST) -> Any:
        return _value(inner, names, depth + 1)

    if depth > 50:
        raise Unknown(ast.unparse(node))
    match node:
        case ast.Constant() if node.value is not ...:
            return node.value
        case ast.Attribute(value=ast.Name()) if f".{node.attr}" in names:  # of the command line
            return known(names[f".{node.attr}"])
        case ast.Call(func=ast.Name(id="dict"), args=[]):
            return {str(each.arg): known(each.value) for each in node.keywords}
        case ast.Name() if node.id in names:
            return known(names[node.id])
        case ast.List() | ast.Tuple() | ast.Set():
            return [known(item) for item in node.elts]
        case ast.Dict() if None not in node.keys:
            return {known(key): known(value) for key, value in zip(node.keys, node.values, strict=True) if key}
        case ast.BinOp(op=ast.Pow()):
            base, power = known(node.left), known(node.right)
            if abs(power) <= MAX_POWER and abs(base) < 1 << 16:
                return base**power
        case ast.BinOp() if type(node.op) in OPERATORS:
            left, right = known(node.left), known(node.right)
            if isinstance(node.op, ast.Add) or (not isinstance(left, str | list) and not isinstance(right, str | list)):
                return OPERATORS[type(node.op)](left, right)
        case ast.UnaryOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](known(node.operand))
        case ast.JoinedStr():
            return "".join(known(part) for part in node.values)
        case ast.FormattedValue() if node.conversion == -1 and node.format_spec is None:
            return str(known(node.value))
        case ast.Subscript():
            return known(node.value)[known(node.slice)]
        case ast.IfExp():
            return known(node.body) if known(node.test) else known(node.orelse)
    raise Unknown(ast.unparse(node))
