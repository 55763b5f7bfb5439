"""Reads single values of data files: answers as text, values for error messages, checks for invalid text."""

from decimal import Decimal
from typing import Any


def plain_text(value: Any) -> str | None:
    """Returns the text of an answer: a string unchanged, a number in plain decimals (1e-05 is 0.00001), the item of a
    list of one. None for everything else (other lists, objects, booleans, NaN), which no answer could equal."""
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    return format(number, "f") if number.is_finite() else None


def refuse_halves(text: str, what: str) -> None:
    """Raises ValueError for half of a surrogate pair, which JSON may contain but no tokenizer or file accepts. what:
    row and column, for the error."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise ValueError(f"{what} holds {half}, half of a character; correct or remove the row") from None


def shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "(deeply nested)"
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
