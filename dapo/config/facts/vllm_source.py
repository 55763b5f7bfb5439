"""Reads the names of vLLM's engine arguments from its source: importing vLLM would take seconds and load torch."""

import ast
import functools
import importlib.util
from pathlib import Path


@functools.cache
def engine_arguments() -> frozenset[str]:
    """Empty if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py").read_text(encoding="utf-8")
    classes = [one for one in ast.parse(source).body if isinstance(one, ast.ClassDef)]
    lines = [line for one in classes if one.name in ("EngineArgs", "AsyncEngineArgs") for line in one.body]
    targets = [line.target for line in lines if isinstance(line, ast.AnnAssign)]
    return frozenset(target.id for target in targets if isinstance(target, ast.Name))
