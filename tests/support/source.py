"""Reads Python source for the tests that judge it."""

import ast
import gc


def tree(source: str) -> ast.Module:
    """Parses with the garbage collector off: CPython 3.11 before 3.11.8 counts the depth of all threads in one place,
    and a collection lets another thread in (https://github.com/python/cpython/issues/106905)."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collecting:
            gc.enable()
