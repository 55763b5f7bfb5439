"""A person's reward functions: what they are given and may return, weights, accuracy, and unscorable responses."""

import asyncio
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from dapo.config.reward import RewardFunctionConfig
from dapo.rewards.calling.functions import RewardFunctionError, RewardFunctions
from dapo.rewards.calling.loading import load

README = Path(__file__).resolve().parents[2] / "dapo/rewards/README.md"
HEAD = "import math\nimport numpy as np\ndef {}(data_source, solution_str, ground_truth, extra_info=None):\n    "


def spec(folder: Path, body: str, *, name: str = "compute_score", file: str = "mine.py", **entry: Any) -> Any:
    """A configured reward function with `body` as its statements."""
    path = folder / file
    path.write_text(HEAD.format(name) + body + "\n")
    return RewardFunctionConfig(path=str(path), name=name, **entry)


def of_file(folder: Path, text: str, **entry: Any) -> Any:
    """A configured reward function `f` of a file."""
    (folder / "f.py").write_text(text)
    return RewardFunctionConfig(path=str(folder / "f.py"), name="f", **entry)


def test_the_default_is_the_rule_verifier() -> None:
    functions = RewardFunctions([RewardFunctionConfig()])
    right = functions.score("math_dapo", "Answer: 42", "42")
    assert (right.accuracy, right.reward, right.parts, right.prediction) == (1.0, 1.0, {"math": 1.0}, "42")
    wrong = functions.score("math_dapo", "Answer: 41", "42")
    assert (wrong.accuracy, wrong.reward, wrong.prediction) == (0.0, -1.0, "41")


def test_the_function_of_the_readme(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "my_reward.py").write_text(program)
    loaded = RewardFunctions([RewardFunctionConfig(path=str(tmp_path / "my_reward.py"), kwargs={"strict": True})])
    assert [loaded.score_alone(label, canary) - canary.score for label, canary in loaded.canaries()] == [0.0, 0.0]
    score = loaded.score("mine", "Answer: Yes", "yes")
    assert (score.accuracy, score.reward, score.prediction) == (0.0, -1.0, "Yes")
    assert score.metrics == {"compute_score/answer_chars": 3.0}


def test_the_function_gets_what_verl_gives_it_by_keyword(tmp_path: Path) -> None:
    swapped = of_file(
        tmp_path,
        "def f(ground_truth, solution_str, extra_info, data_source):\n"
        "    assert (data_source, solution_str, ground_truth, extra_info) == ('gsm8k', 'text', '42', {'index': 7})\n"
        "    return 0.25\n",
    )
    assert RewardFunctions([swapped]).score("gsm8k", "text", "42", {"index": 7}).reward == 0.25


@pytest.mark.parametrize(
    ("body", "accuracy", "reward", "prediction"),
    [
        pytest.param("return 0.5", 1.0, 0.5, "", id="positive-is-right"),
        pytest.param("return 0", 0.0, 0.0, "", id="zero-is-wrong"),
        pytest.param("return True", 1.0, 1.0, "", id="bool"),
        pytest.param("return np.float32(0.5)", 1.0, 0.5, "", id="numpy-float"),
        pytest.param("return np.float16(0.5)", 1.0, 0.5, "", id="half"),
        pytest.param("from fractions import Fraction; return Fraction(1, 2)", 1.0, 0.5, "", id="fraction"),
        pytest.param("return np.int64(-1)", 0.0, -1.0, "", id="numpy-int"),
        pytest.param("return np.bool_(True)", 1.0, 1.0, "", id="numpy-bool"),
        pytest.param("return {'score': -1.0, 'acc': True, 'pred': '42'}", 1.0, -1.0, "42", id="dict"),
        pytest.param("return {'score': 2.0, 'acc': np.bool_(False)}", 0.0, 2.0, "", id="acc-beats-the-sign"),
        pytest.param("return {'score': 1.0, 'pred': None, 'steps': []}", 1.0, 1.0, "", id="other-keys-are-its-own"),
        pytest.param("return {'score': 1.0, 'pred': 42}", 1.0, 1.0, "42", id="prediction-as-number"),
        pytest.param("return {'score': 1, 'pred': 'a\\x00\\ud800' * 200}", 1, 1, "a\ufffd\ufffd" * 100, id="storable"),
        pytest.param("return {'score': 1.0, 'acc': 1 + 1e-12}", 1.0, 1.0, "", id="rounding"),
        pytest.param("return None", math.nan, math.nan, "", id="none-is-unscorable"),
        pytest.param("return math.nan", math.nan, math.nan, "", id="nan-is-unscorable"),
        pytest.param("return {'score': None, 'acc': True}", math.nan, math.nan, "", id="no-score-though-acc"),
        pytest.param("return {'score': 1.0, 'acc': None}", math.nan, math.nan, "", id="no-acc-though-score"),
    ],
)
def test_what_a_function_may_return(tmp_path: Path, body: str, accuracy: float, reward: float, prediction: str) -> None:
    score = RewardFunctions([spec(tmp_path, body)]).score("source", "text", "42")
    assert [score.accuracy, score.reward] == pytest.approx([accuracy, reward], nan_ok=True)
    assert score.prediction == prediction
    assert type(score.accuracy) is float and type(score.reward) is float


@pytest.mark.parametrize(
    ("body", "kind", "named"),
    [
        pytest.param("return 'SECRET'", TypeError, "(mine.py) gave str as its score", id="text-is-not-quoted"),
        pytest.param("return [1.0]", TypeError, "[1.0]", id="list"),
        pytest.param("return 1j", TypeError, "1j", id="complex"),
        pytest.param("return np.ones(1)", TypeError, "array([1.])", id="array"),
        pytest.param("return {'reward': 1.0}", TypeError, "(mine.py) gave a dict without `score`", id="no-score"),
        pytest.param("return {'score': 1.0, 'acc': 'SECRET'}", TypeError, "gave str as its acc", id="acc-is-text"),
        pytest.param("return {'score': 1.0, 'acc': 85}", ValueError, "(mine.py) gave 85 as its acc", id="percent"),
        pytest.param("return {'score': 1.0, 'acc': -1.0}", ValueError, "-1 as its acc", id="signed"),
        pytest.param("return -math.inf", ValueError, "infinite score", id="infinity"),
        pytest.param("return 10 ** 400", ValueError, "infinite score", id="beyond-floats"),
        pytest.param("async def g(): return 1\n    return g()", TypeError, "write it as `async def`", id="no-await"),
    ],
)
def test_what_a_function_may_not_return(tmp_path: Path, body: str, kind: type, named: str) -> None:
    with pytest.raises(kind) as error:
        RewardFunctions([spec(tmp_path, body)]).score("source", "text", "42")
    assert "`compute_score`" in str(error.value) and named in str(error.value)
    assert "SECRET" not in str(error.value)


def test_no_function_sees_what_another_one_or_an_earlier_call_has_changed(tmp_path: Path) -> None:
    takes = spec(tmp_path, "return extra_info['levels'].pop()", name="takes", file="takes.py")
    looks = spec(tmp_path, "return len(extra_info['levels'])", name="looks", file="looks.py")
    grows = of_file(tmp_path, "def f(seen, **rest):\n    seen.append(1)\n    return len(seen)\n", kwargs={"seen": []})
    functions = RewardFunctions([takes, looks, grows])
    for _ in range(2):
        assert functions.score("source", "text", "42", {"levels": [3]}).parts == {"takes": 3, "looks": 1, "f": 1}


def test_weights_parts_and_the_first_verdict(tmp_path: Path) -> None:
    second = "return {'score': 1, 'acc': 0, 'pred': 'second'}"
    functions = RewardFunctions(
        [
            spec(tmp_path, "return -1", name="style", weight=0.5, file="a.py"),
            spec(tmp_path, "return {'score': 2, 'acc': 1, 'pred': 'first'}", name="mark", weight=2.0, file="b.py"),
            spec(tmp_path, second, name="other", weight=-1.0, wrong=1.0, file="c.py"),
            spec(tmp_path, "return None", name="watched", weight=0.0, file="d.py"),
        ]
    )
    score = functions.score("source", "text", "42")
    assert score.parts == pytest.approx({"style": -1.0, "mark": 2.0, "other": 1.0, "watched": math.nan}, nan_ok=True)
    assert (score.reward, score.accuracy, score.prediction) == (0.5 * -1 + 2.0 * 2 - 1.0, 1.0, "first")


def test_one_unscorable_part_makes_the_response_unscorable(tmp_path: Path) -> None:
    second = spec(tmp_path, "return None", name="second")
    score = RewardFunctions([RewardFunctionConfig(), second]).score("source", "Answer: 42", "42")
    assert math.isnan(score.reward) and math.isnan(score.accuracy)
    assert score.parts["math"] == 1.0


def test_labels_tell_functions_of_one_name_apart_and_from_the_penalty(tmp_path: Path) -> None:
    one, other = spec(tmp_path, "return 1.0", file="one.py"), spec(tmp_path, "return 0.5", file="other.py")
    score = RewardFunctions([RewardFunctionConfig(), one, other]).score("source", "Answer: 42", "42")
    assert score.parts == {"math": 1.0, "one.compute_score": 1.0, "other.compute_score": 0.5}
    assert RewardFunctions([spec(tmp_path, "return 1", name="overlong")]).labels == ("mine.overlong",)


def test_an_exception_names_function_source_and_place(tmp_path: Path) -> None:
    functions = RewardFunctions([spec(tmp_path, "return float(solution_str)")])
    with pytest.raises(RewardFunctionError) as error:
        functions.score("gsm8k", "x\n\x1b[31m" * 1000, "42")
    message = str(error.value)
    assert all(part in message for part in ["`compute_score`", "ValueError", "'gsm8k'", "line 4 of mine.py"])
    assert message.isprintable() and len(message) < 500
    assert str(pickle.loads(pickle.dumps(error.value))) == message, "it crosses processes"


def test_the_memory_limit_is_not_an_exception_of_the_function(tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        RewardFunctions([spec(tmp_path, "raise MemoryError")]).score("source", "text", "42")


@pytest.mark.parametrize(
    ("specs", "named"),
    [
        ([], "`reward.functions` is empty"),
        ([RewardFunctionConfig(weight=-0.5)], r"functions\[0\].wrong` \(-1.0\).*would pay"),
        ([RewardFunctionConfig(weight=math.nan)], r"functions\[0\].weight` \(nan\)"),
        ([RewardFunctionConfig(), RewardFunctionConfig()], r"functions\[1\].*functions\[0\]"),
    ],
    ids=["none", "a-limit-pays", "weight-nan", "twice"],
)
def test_lists_that_cannot_be_right(specs: list[RewardFunctionConfig], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RewardFunctions(specs)


def test_kwargs_reach_the_function(tmp_path: Path) -> None:
    text = "def f(data_source, solution_str, ground_truth, extra_info=None, *, bonus):\n    return bonus\n"
    functions = RewardFunctions([of_file(tmp_path, text, kwargs={"bonus": 0.5})])
    assert functions.score("source", "text", "42").reward == 0.5
    with pytest.raises(ValueError, match=r"`reward.functions\[0\]`.*kwargs.*bonus"):
        RewardFunctions([of_file(tmp_path, text)])


def test_a_function_sees_only_the_end_that_it_reads(tmp_path: Path) -> None:
    body = "def f(data_source, solution_str, ground_truth, extra_info=None):\n    return float(solution_str)\n"
    last = of_file(tmp_path, "READS_LAST = 3\n" + body)
    functions = RewardFunctions([last])
    assert functions.reads_last == 3
    assert functions.score("source", "12345", "42").reward == 345
    assert RewardFunctions([last, spec(tmp_path, "return 0.0")]).reads_last is None


def test_other_numbers_become_metrics_unless_no_float_holds_them(tmp_path: Path) -> None:
    body = "return {'score': 1, 'pred': '4', 'steps': 3, 'ok': np.bool_(True), 'note': 'x', 'guess': 10 ** 400}"
    score = RewardFunctions([spec(tmp_path, body)]).score("source", "text", "42")
    assert (score.accuracy, score.metrics) == (1.0, {"compute_score/steps": 3.0, "compute_score/ok": 1.0})


def test_a_limit_makes_a_response_wrong_in_every_function(tmp_path: Path) -> None:
    second = spec(tmp_path, "return 1.0", name="style", weight=0.5, wrong=-2.0)
    score = RewardFunctions([RewardFunctionConfig(), second]).at_limit("cpu")
    assert (score.accuracy, score.reward, score.failure) == (0.0, -1.0 + 0.5 * -2.0, "cpu")
    assert score.parts == {"math": -1.0, "style": -2.0}


OTHERS = """

def trl(prompts, completions, solution, level, **kwargs):
    assert prompts[0][0]["role"] == "system" and "num_response_tokens" not in kwargs
    return [float(one[0]["content"] == truth) * part for one, truth, part in zip(completions, solution, level)]

def text(completions, answer):
    return [float(one.startswith(truth)) for one, truth in zip(completions, answer)]

async def asks(prompts, completions, ground_truth, bonus):
    return [bonus if completions[0][0]["content"] == ground_truth[0] else None]

def one(completion, answer, info):
    return float(completion[-1]["content"] == answer) * info["level"]

async def parsed(completion, parser, state):
    return float(parser(completion[-1]["content"]) == state["answer"])

def counts(completion_ids): ...
def plays(completions, environments): ...
def wants(completions, hints): return [1.0]
def gives(completions): return 1.0
def of_group(states): return [1.0]

# Looks like verifiers' Rubric: lists of functions and weights, and objects that these are given.
Rubric = type("Rubric", (), {"__module__": "verifiers.rubrics.rubric"})
rubric = Rubric()
rubric.funcs, rubric.weights, rubric.class_objects = [one, parsed], [1.0, 0.5], {"parser": str.strip}
group = Rubric()
group.rubrics = [rubric, rubric]
whole = Rubric()
whole.funcs, whole.weights, whole.class_objects = [of_group], [1.0], {}
"""
EXTRA = {
    "level": 0.5,
    "num_response_tokens": 3,
    "conversation": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}],
}


def other(folder: Path, name: str, **entry: Any) -> Any:
    (folder / "others.py").write_text(OTHERS)
    return load(RewardFunctionConfig(path=str(folder / "others.py"), name=name, **entry))


@pytest.mark.parametrize(
    ("name", "entry", "right", "wrong"),
    [
        pytest.param("trl", {}, 0.5, 0.0, id="trl"),
        pytest.param("text", {"signature": "trl_text"}, 1.0, 0.0, id="trl-text"),
        pytest.param("asks", {"kwargs": {"bonus": 2.0}}, 2.0, None, id="trl-async"),
        pytest.param("one", {}, {"one": 0.5, "score": 0.5, "acc": 1.0}, {"one": 0.0, "score": 0.0, "acc": 0.0}),
        pytest.param("rubric", {}, {"one": 0.5, "parsed": 1.0, "score": 1.0, "acc": 1.0}, None, id="rubric"),
        pytest.param("group", {}, {"one": 0.5, "parsed": 1.0, "score": 2.0, "acc": 1.0}, None, id="group-of-rubrics"),
    ],
)
def test_functions_of_trl_and_rubrics(tmp_path: Path, name: str, entry: dict[str, Any], right: Any, wrong: Any) -> None:
    function = other(tmp_path, name, **entry)
    assert function.reads_conversation

    def asked(text: str) -> Any:
        value = function.ask("sums", text, "2", EXTRA)
        return asyncio.run(value) if function.asynchronous else value

    assert asked("2") == right
    assert isinstance(right, dict) and wrong is None or asked("3") == wrong


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("counts", r"\('counts'\) needs completion_ids, .*`reward.overlong_buffer`", id="ids"),
        pytest.param("plays", r"needs environments, .*`rollout.function.path`", id="environments"),
        pytest.param("wants", "wants needs `hints`, and the row has answer, completions, .* level", id="column"),
        pytest.param("gives", "gave float for a batch of one; give a list", id="no-list"),
        pytest.param("text", "messages: set `signature: trl_text`", id="wants-text"),
        pytest.param("whole", r"\('whole'\): of_group scores all responses of a prompt at once", id="of-groups"),
    ],
)
def test_what_dapo_cannot_give_to_them_is_told(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        other(tmp_path, name).ask("sums", "2", "2", EXTRA)
