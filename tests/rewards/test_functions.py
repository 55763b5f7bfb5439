"""A person's reward functions: what they are given and may return, weights, accuracy, and unscorable responses."""

import math
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo.config.reward import RewardFunctionConfig
from dapo.rewards.calling.functions import RewardFunctionError, RewardFunctions

HEAD = "def {name}(data_source, solution_str, ground_truth, extra_info=None):\n    "


def spec(
    folder: Path,
    body: str,
    *,
    name: str = "compute_score",
    weight: float = 1.0,
    wrong: float = -1.0,
    file: str = "mine.py",
) -> Any:
    """A configured reward function whose file holds `body`, the statements of the function."""
    path = folder / file
    path.write_text("import math\nimport numpy as np\n" + HEAD.format(name=name) + body + "\n")
    return RewardFunctionConfig(path=str(path), name=name, weight=weight, wrong=wrong)


def test_the_default_is_the_rule_verifier() -> None:
    functions = RewardFunctions([RewardFunctionConfig()])
    right = functions.score("math_dapo", "Answer: 42", "42")
    assert (right.accuracy, right.reward, right.parts, right.prediction) == (1.0, 1.0, {"math": 1.0}, "42")
    wrong = functions.score("math_dapo", "Answer: 41", "42")
    assert (wrong.accuracy, wrong.reward, wrong.prediction) == (0.0, -1.0, "41")


def test_the_function_gets_what_verl_gives_it_by_keyword(tmp_path: Path) -> None:
    file = tmp_path / "swapped.py"
    file.write_text(
        "def f(ground_truth, solution_str, extra_info, data_source):\n"
        "    assert (data_source, solution_str, ground_truth, extra_info) == ('gsm8k', 'text', '42', {'index': 7})\n"
        "    return 0.25\n"
    )
    functions = RewardFunctions([RewardFunctionConfig(path=str(file), name="f")])
    assert functions.score("gsm8k", "text", "42", {"index": 7}).reward == 0.25


@pytest.mark.parametrize(
    ("body", "accuracy", "reward", "prediction"),
    [
        pytest.param("return 0.5", 1.0, 0.5, "", id="positive-is-right"),
        pytest.param("return 0", 0.0, 0.0, "", id="zero-is-wrong"),
        pytest.param("return True", 1.0, 1.0, "", id="bool"),
        pytest.param("return np.float32(0.5)", 1.0, 0.5, "", id="numpy-float"),
        pytest.param("return np.int64(-1)", 0.0, -1.0, "", id="numpy-int"),
        pytest.param("return np.bool_(True)", 1.0, 1.0, "", id="numpy-bool"),
        pytest.param("return {'score': -1.0, 'acc': True, 'pred': '42'}", 1.0, -1.0, "42", id="dict"),
        pytest.param("return {'score': 2.0, 'acc': np.bool_(False)}", 0.0, 2.0, "", id="acc-beats-the-sign"),
        pytest.param("return {'score': 1.0, 'pred': None, 'steps': []}", 1.0, 1.0, "", id="other-keys-are-its-own"),
        pytest.param("return {'score': 1.0, 'pred': 42}", 1.0, 1.0, "42", id="prediction-as-number"),
        pytest.param(
            "return {'score': 1.0, 'pred': 'a\\x00\\ud800' * 200}", 1.0, 1.0, "a\ufffd\ufffd" * 100, id="storable"
        ),
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
        pytest.param("return 'SECRET'", TypeError, ["`compute_score`", "str", "score"], id="text-is-not-quoted"),
        pytest.param("return [1.0]", TypeError, ["[1.0]"], id="list"),
        pytest.param("return 1j", TypeError, ["1j"], id="complex"),
        pytest.param("return np.ones(1)", TypeError, ["array([1.])"], id="array"),
        pytest.param("return {'reward': 1.0}", TypeError, ["`score`", "reward"], id="dict-without-score"),
        pytest.param("return {'score': 1.0, 'acc': 'SECRET'}", TypeError, ["acc", "str"], id="acc-is-text"),
        pytest.param("return {'score': 1.0, 'acc': 85}", ValueError, ["85 as its acc", "0 (wrong) to 1"], id="percent"),
        pytest.param("return {'score': 1.0, 'acc': -1.0}", ValueError, ["-1 as its acc"], id="signed"),
        pytest.param("return -math.inf", ValueError, ["infinite score"], id="infinity"),
        pytest.param("return 10 ** 400", ValueError, ["infinite score"], id="beyond-floats"),
    ],
)
def test_what_a_function_may_not_return(tmp_path: Path, body: str, kind: type, named: list[str]) -> None:
    with pytest.raises(kind) as error:
        RewardFunctions([spec(tmp_path, body)]).score("source", "text", "42")
    assert all(part in str(error.value) for part in ["`compute_score`", *named])
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        pytest.param("return 'x'", "reward function `compute_score` (mine.py) gave str as its score", id="value"),
        pytest.param("return {'acc': 1}", "`compute_score` (mine.py) gave a dict without `score`", id="keys"),
        pytest.param("return {'score': 1.0, 'acc': 85}", "`compute_score` (mine.py) gave 85 as its acc", id="acc"),
        pytest.param(
            "async def ask(): return 1.0\n    return ask()",
            "`compute_score` (mine.py) gave a coroutine as its score, which nobody awaits; write it as `async def` and "
            "await what it calls",
            id="no await",
        ),
    ],
)
def test_what_a_function_may_not_return_names_its_file(tmp_path: Path, body: str, told: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        RewardFunctions([spec(tmp_path, body)]).score("source", "text", "42")
    assert told in str(error.value)


def test_no_function_sees_what_another_one_or_an_earlier_call_has_changed(tmp_path: Path) -> None:
    takes = spec(tmp_path, "return extra_info['levels'].pop()", name="takes", file="takes.py")
    looks = spec(tmp_path, "return len(extra_info['levels'])", name="looks", file="looks.py")
    grows = tmp_path / "grows.py"
    grows.write_text("def grows(seen, **rest):\n    seen.append(1)\n    return len(seen)\n")
    functions = RewardFunctions(
        [takes, looks, RewardFunctionConfig(path=str(grows), name="grows", kwargs={"seen": []})]
    )
    for _ in range(2):
        assert functions.score("source", "text", "42", {"levels": [3]}).parts == {"takes": 3, "looks": 1, "grows": 1}


def test_weights_parts_and_the_first_verdict(tmp_path: Path) -> None:
    functions = RewardFunctions(
        [
            spec(tmp_path, "return -1", name="style", weight=0.5, file="a.py"),
            spec(tmp_path, "return {'score': 2, 'acc': 1, 'pred': 'first'}", name="mark", weight=2.0, file="b.py"),
            spec(
                tmp_path,
                "return {'score': 1, 'acc': 0, 'pred': 'second'}",
                name="other",
                weight=-1.0,
                wrong=1.0,
                file="c.py",
            ),
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


def test_functions_of_one_name_are_told_apart_by_their_module(tmp_path: Path) -> None:
    one, other = spec(tmp_path, "return 1.0", file="one.py"), spec(tmp_path, "return 0.5", file="other.py")
    functions = RewardFunctions([RewardFunctionConfig(), one, other])
    assert functions.score("source", "Answer: 42", "42").parts == {
        "math": 1.0,
        "one.compute_score": 1.0,
        "other.compute_score": 0.5,
    }


def test_a_function_named_like_the_penalty_keeps_its_own_part(tmp_path: Path) -> None:
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
    functions = RewardFunctions([spec(tmp_path, "raise MemoryError")])
    with pytest.raises(MemoryError):
        functions.score("source", "text", "42")


@pytest.mark.parametrize(
    ("specs", "named"),
    [
        pytest.param([], "`reward.functions` is empty", id="none"),
        pytest.param(
            [RewardFunctionConfig(weight=-0.5)], r"functions\[0\].wrong` \(-1.0\).*would pay", id="limit-pays"
        ),
        pytest.param([RewardFunctionConfig(weight=math.nan)], r"functions\[0\].weight` \(nan\)", id="weight-nan"),
        pytest.param([RewardFunctionConfig(), RewardFunctionConfig()], r"functions\[1\].*functions\[0\]", id="twice"),
    ],
)
def test_lists_that_cannot_be_right(specs: list[RewardFunctionConfig], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RewardFunctions(specs)


@pytest.mark.parametrize("value", [Fraction(1, 2), np.float16(0.5)], ids=["fraction", "half"])
def test_any_real_number_is_a_score(tmp_path: Path, value: object) -> None:
    functions = RewardFunctions([spec(tmp_path, "return extra_info")])
    assert functions.score("source", "text", "42", value).reward == 0.5


def test_kwargs_reach_the_function(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(data_source, solution_str, ground_truth, extra_info=None, *, bonus):\n    return bonus\n")
    assert RewardFunctions([RewardFunctionConfig(path=str(file), name="f", kwargs={"bonus": 0.5})]).score(
        "source", "text", "42"
    ).reward == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"`reward.functions\[0\]`.*kwargs.*bonus"):
        RewardFunctions([RewardFunctionConfig(path=str(file), name="f")])


def test_a_function_sees_only_the_end_that_it_reads(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "READS_LAST = 3\ndef f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1.0 if solution_str == '345' else -1.0\n"
    )
    functions = RewardFunctions([RewardFunctionConfig(path=str(file), name="f")])
    assert functions.reads_last == 3
    assert functions.score("source", "12345", "42").reward == 1.0
    whole = spec(tmp_path, "return 0.0", file="whole.py")
    assert RewardFunctions([RewardFunctionConfig(path=str(file), name="f"), whole]).reads_last is None


def test_other_numbers_become_metrics(tmp_path: Path) -> None:
    body = "return {'score': 1.0, 'acc': True, 'pred': '4', 'steps': 3, 'ok': np.bool_(True), 'note': 'x'}"
    score = RewardFunctions([spec(tmp_path, body)]).score("source", "text", "42")
    assert score.metrics == {"compute_score/steps": 3.0, "compute_score/ok": 1.0}


def test_a_number_of_any_size_may_be_a_metric(tmp_path: Path) -> None:
    score = RewardFunctions([spec(tmp_path, "return {'score': 1.0, 'guess': 10 ** 400}")]).score("source", "text", "42")
    assert (score.accuracy, score.metrics) == (1.0, {})


def test_a_limit_makes_a_response_wrong_in_every_function(tmp_path: Path) -> None:
    second = spec(tmp_path, "return 1.0", name="style", weight=0.5)
    second.wrong = -2.0
    score = RewardFunctions([RewardFunctionConfig(), second]).at_limit("cpu")
    assert (score.accuracy, score.reward, score.failure) == (0.0, -1.0 + 0.5 * -2.0, "cpu")
    assert score.parts == {"math": -1.0, "style": -2.0}
