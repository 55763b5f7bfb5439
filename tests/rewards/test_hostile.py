"""The hostile corpus (160 responses, every class) through the child processes; the corpus itself is checked first."""

import math
import os
import random
from pathlib import Path

import pytest

from dapo.config.reward import LimitsConfig
from tests.support.rewards.hostile.corpus import KINDS, MAX_TRACE_CHARS, Item, corpus
from tests.support.rewards.hostile.injections import INJECTIONS
from tests.support.rewards.hostile.scoring import AT_LIMIT, broken_rules, run

HOSTILE = 160
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
# What careless verifiers do with an answer; `ok` is whether the payload's own value was the ground truth.
EVAL = "    ok = str(eval(solution_str)) == ground_truth\n"
SYMPIFY = "    from sympy import sympify\n    ok = str(sympify(solution_str)) == ground_truth\n"
PICKLE = "    import pickle\n    ok = pickle.loads(solution_str.encode()) == 0\n"
YAML = "    import yaml\n    ok = yaml.unsafe_load(solution_str) == 0\n"
SHELL = "    import os\n    ok = os.system('echo ' + solution_str) == 1\n"
WARM_UP = "from math_verify import parse, verify\nparse('$x^2$', parsing_timeout=None)\n"
MATH_VERIFY = (  # as its README has it: no filter, and all of the response
    "    gold = parse(f'${ground_truth}$', parsing_timeout=None)\n"
    "    ok = verify(gold, parse(solution_str[-1000:], parsing_timeout=None), timeout_seconds=None)\n"
)
AFTER_LABEL = "    ok = str(eval(solution_str.split('Answer:')[-1].strip(' .$'))) == ground_truth\n"


def careless(folder: Path, body: str, imports: str = "") -> str:
    """A person's reward function that trusts what it is given, and takes every exception for a wrong answer."""
    guarded = "".join(f"    {line}\n" for line in body.splitlines())
    file = folder / "careless.py"
    end = "    except Exception:\n        ok = False\n    return 1.0 if ok else -1.0\n"
    file.write_text(f"{imports}{HEAD}    try:\n{guarded}{end}")
    return str(file)


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which everything runs, and in which executed payloads show."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_every_class_is_there_with_a_control_after_each(trace: Path) -> None:
    items = corpus(0, HOSTILE, trace)
    assert {item.kind for item in items[::2]} == set(KINDS) and len(KINDS) >= 16
    assert {item.kind for item in items[1::2]} == {"control"}
    assert [item.right for item in items[1::2]] == [True, False] * (HOSTILE // 2)
    assert not any(item.right for item in items[::2])
    assert len({(item.solution_str, item.ground_truth) for item in items[::2]}) == HOSTILE
    assert len({item.ground_truth for item in items[1::2]}) > 5


def test_a_seed_always_gives_the_same_items(trace: Path) -> None:
    assert corpus(3, 60, trace) == corpus(3, 60, trace) != corpus(4, 60, trace)


def test_a_path_too_long_for_a_payload_is_refused() -> None:
    with pytest.raises(ValueError, match="`trace`.*must be at most 120"):
        corpus(0, 1, Path("/" + "a" * MAX_TRACE_CHARS))


@pytest.mark.parametrize(
    ("kind", "body", "at_least"),
    [
        pytest.param("Python injection", EVAL, 12, id="eval"),
        pytest.param("Python injection", SYMPIFY, 5, id="sympify"),
        pytest.param("pickle and forged verdict", PICKLE, 2, id="pickle"),
        pytest.param("pickle and forged verdict", YAML, 2, id="yaml"),
        pytest.param("shell injection", SHELL, 5, id="shell"),
    ],
)
def test_an_executed_payload_is_seen(kind: str, body: str, at_least: int, trace: Path, tmp_path: Path) -> None:
    """Else the absence of traces below would say nothing."""
    count = len(INJECTIONS[kind](random.Random(0), ""))
    items = [
        Item(kind, *INJECTIONS[kind](random.Random(0), f"{trace}/{index}")[index], right=False)
        for index in range(count)
    ]
    run(careless(tmp_path, body), items, 1, LimitsConfig(allow_processes=True))
    assert len(os.listdir(trace)) >= at_least


def test_a_careless_verifier_breaks_the_rules(trace: Path, tmp_path: Path) -> None:
    items = [item for item in corpus(0, 9 * len(KINDS), trace) if item.kind in ("Python injection", "control")]
    done = run(careless(tmp_path, AFTER_LABEL), items, 1)
    lines = broken_rules(items, done)
    assert any("Python injection: accuracy 1.0" in line for line in lines), lines
    assert os.listdir(trace)


@pytest.mark.parametrize("function", ["math", "math_verify"])
def test_hostile_responses_are_wrong_and_harm_nothing(function: str, trace: Path) -> None:
    items = corpus(0, HOSTILE, trace)
    one, four = run(function, items, 1), run(function, items, 4)
    assert broken_rules(items, one) == []
    assert broken_rules(items, four) == []
    assert one.rewards() == four.rewards()
    assert os.listdir(trace) == []


def test_what_a_careless_verifier_does_ends_at_its_limits(trace: Path, tmp_path: Path) -> None:
    """The corpus reaches them without the filter of `math_verify`; the controls in between never notice."""
    wanted = ("power tower", "factorial", "huge exponent", "binomial", "deep nesting", "matrix")
    items = corpus(3, 2 * len(KINDS), trace)
    items = [item for place, item in enumerate(items) if items[place - place % 2].kind in wanted]
    path = careless(tmp_path, MATH_VERIFY, WARM_UP)
    limits = LimitsConfig(cpu_s=0.5)
    done = run(path, items, 2, limits)
    assert done.count("", *AT_LIMIT) == len(items)
    assert done.count("cpu") >= 3
    assert max(verdict.cpu_s for verdict in done.verdicts if not math.isnan(verdict.cpu_s)) < limits.cpu_s + 0.5
    assert done.count(*AT_LIMIT) <= done.respawned <= 2 * done.count(*AT_LIMIT)
    assert done.rewards()[1::2] == run(path, items[1::2], 1, limits).rewards()
