"""Reads the fields of a GRPOConfig and of its trainer from a Python script, which is parsed and never executed."""

import ast
import builtins
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo.tools.translate.shell import is_known, unknown
from dapo.tools.translate.values import Unknown, value_of

CONFIG, TRAINER, ADAPTERS = "GRPOConfig", "GRPOTrainer", ("LoraConfig",)
OF_TRL = {
    "accuracy_reward": "trl.rewards.accuracy_rewards",
    "reasoning_accuracy_reward": "trl.rewards.accuracy_rewards",
    "think_format_reward": "trl.rewards.format_rewards",
    "get_soft_overlong_punishment": "trl.rewards.other_rewards",
}


def fields_of(path: Path, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields by name, and what could not be read. options: of the script's command line, which count.
    Raises ValueError where there is no GRPOConfig."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise ValueError(f"{path}: line {error.lineno}: it is no Python ({error.msg})") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [call for call in calls if _called(call).endswith(CONFIG)]
    trainers = [call for call in calls if _called(call).endswith(TRAINER)]
    if not configs and not trainers:
        raise ValueError(f"{path} calls neither {CONFIG} nor {TRAINER}")
    names = _names(tree, max(call.end_lineno or 0 for call in (*configs[:1], *trainers[:1])))
    own = sorted(name for name in options if f".{name}" in names)
    names |= {f".{name}": ast.parse(repr(value), mode="eval").body for name, value in options.items()}
    notes = [f"{len(configs)} calls of {CONFIG}, of which the first was read"] if len(configs) > 1 else []
    if own:
        notes.append(f"options of the script itself, which count where it passes them on: {', '.join(own)}")
    given: dict[str, Any] = {}
    for call in configs[:1]:
        given |= {"output_dir": _value(call.args[0], names)} if call.args else {}
        given |= _keywords(call, names, "")
    for call in trainers[:1]:
        given |= {f"{TRAINER}.model": _value(call.args[0], names)} if call.args else {}
        given |= _keywords(call, names, f"{TRAINER}.")
        given.pop(f"{TRAINER}.args", None)
    for call in calls:
        if _called(call) in ADAPTERS:
            given |= _keywords(call, names, f"{_called(call)}.")
            given.pop(f"{TRAINER}.peft_config", None)
    settings = _names_of(trainers[:1], "args") | {name for name, node in names.items() if node in configs}
    for node in ast.walk(tree):  # training_args.beta = 0.0
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            target = node.targets[0]
            if isinstance(target.value, ast.Name) and target.value.id in settings:
                given |= _field(target.attr, node.value, names, "")
    given |= {name: value for name, value in options.items() if name not in own}
    if not configs and not options:
        notes.append(f"its {CONFIG} comes from the command line: give that too, as in python {path.name} --beta 0.0")
    return given, notes


def _names(tree: ast.Module, end: int) -> dict[str, ast.AST]:
    """Returns what names stand for in line `end`: the last of several values; under .NAME the default of an option."""
    found: dict[str, ast.AST] = {}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.Call)]
    for node in sorted(nodes, key=lambda each: each.lineno):
        match node:
            case ast.Assign() | ast.AnnAssign() if node.lineno > end:
                continue
            case ast.Assign(targets=[ast.Name() as target]):
                found[target.id] = _Before(target.id, found).visit(node.value)
            case ast.Assign(targets=[ast.Tuple() as many], value=ast.Tuple() as value):
                pairs = zip(many.elts, value.elts, strict=False)
                found |= {each.id: one for each, one in pairs if isinstance(each, ast.Name)}
            case ast.Assign(targets=[ast.Tuple() as many]):
                found |= {each.id: node.value for each in many.elts if isinstance(each, ast.Name)}
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as one):
                found[target.id] = one
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.setdefault(node.name, node)
            case ast.ImportFrom():
                found |= {each.asname or each.name: node for each in node.names}
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=str(option)), *_]):
                default = next((each.value for each in node.keywords if each.arg == "default"), ast.Constant(...))
                found[f".{option.lstrip('-').replace('-', '_')}"] = default
    return found


class _Before(ast.NodeTransformer):
    """Puts what a name stood for in place of it, as in `dataset = dataset.map(f)`."""

    def __init__(self, name: str, found: Mapping[str, ast.AST]) -> None:
        self._name, self._found = name, found

    def visit_Name(self, node: ast.Name) -> ast.AST:  # noqa: N802 the library's name
        return self._found.get(node.id, node) if node.id == self._name else node


def _names_of(calls: list[ast.Call], keyword: str) -> set[str]:
    values = [each.value for call in calls for each in call.keywords if each.arg == keyword]
    return {value.id for value in values if isinstance(value, ast.Name)}


def _called(call: ast.Call) -> str:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return str(name)


def _keywords(call: ast.Call, names: dict[str, ast.AST], prefix: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for each in call.keywords:
        if each.arg is None:
            inner = _value(each.value, names)
            given |= inner if isinstance(inner, dict) else {f"**{ast.unparse(each.value)}": inner}
        else:
            given |= _field(each.arg, each.value, names, prefix)
    return given


def _field(name: str, node: ast.AST, names: dict[str, ast.AST], prefix: str) -> dict[str, Any]:
    inner = names.get(node.id) if isinstance(node, ast.Name) else node
    if name == "reward_funcs":
        return {f"{prefix}{name}": [_function(each, names) for each in _items(node, names)]}
    if name in ("train_dataset", "eval_dataset"):
        return {f"{prefix}{name}": _data(node, names)}
    if isinstance(inner, ast.Call) and _called(inner) in ("get_peft_config", "get_quantization_config"):
        return {}  # of fields of the command line
    if name == "model_init_kwargs" and isinstance(inner, ast.Call) and _called(inner) == "dict":
        kwargs = {str(each.arg): _value(each.value, names) for each in inner.keywords}
        return {name: {key: value for key, value in kwargs.items() if is_known(value)}}
    if name == "model" and isinstance(inner, ast.Call) and _called(inner) == "from_pretrained" and inner.args:
        kwargs = {str(each.arg): _value(each.value, names) for each in inner.keywords}
        return {f"{prefix}{name}": _value(inner.args[0], names)} | ({"model_init_kwargs": kwargs} if kwargs else {})
    return {f"{prefix}{name}": _value(node, names)}


def _value(node: ast.AST, names: dict[str, ast.AST]) -> Any:
    try:
        return value_of(node, {name: one for name, one in names.items() if isinstance(one, ast.expr)})
    except Unknown as error:
        return unknown(str(error))


def _items(node: ast.AST, names: dict[str, ast.AST]) -> list[ast.AST]:
    if isinstance(node, ast.Name) and isinstance(inner := names.get(node.id), ast.List | ast.Tuple):
        node = inner
    return list(node.elts) if isinstance(node, ast.List | ast.Tuple) else [node]


def _function(node: ast.AST, names: dict[str, ast.AST]) -> Any:
    """Returns an entry of `reward.functions`, or the text of what is no function."""
    if isinstance(node, ast.Name) and isinstance(inner := names.get(node.id), ast.Call | ast.Constant):
        node = inner
    kwargs: dict[str, Any] = {}
    if isinstance(node, ast.Call):
        kwargs = {str(each.arg): _value(each.value, names) for each in node.keywords}
        node = node.func
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if node.id in OF_TRL:
            return {"path": OF_TRL[node.id], "name": node.id} | ({"kwargs": kwargs} if kwargs else {})
        match names.get(node.id):
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return {"path": "my_reward.py", "name": node.id}
            case ast.ImportFrom(module=str(module)):
                return {"path": module, "name": node.id}
    return unknown(ast.unparse(node))


def _data(node: ast.AST, names: dict[str, ast.AST]) -> Any:
    """Returns the name of a data set that `load_dataset` reads, however its rows are changed then."""
    for _ in range(20):
        match node:
            case ast.Name(id=name) if name in names and not hasattr(builtins, name):
                if names[name] is node:
                    break
                node = names[name]
            case ast.Subscript(value=inner):
                node = inner
            case ast.Call(func=ast.Attribute(attr=attr) as func) if not attr.startswith(("from_", "load_")):
                node = func.value
            case ast.Call() if _called(node) == "load_dataset" and node.args:
                name, *more = (_value(each, names) for each in node.args)
                files = [each.value for each in node.keywords if each.arg == "data_files"]
                return _value(files[0], names) if files else [name, *more]
            case ast.Constant(value=None):
                return None
            case _:
                break
    return unknown(ast.unparse(node))
