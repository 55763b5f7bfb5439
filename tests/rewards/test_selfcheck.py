"""The check of data files before a run: formats, counts, failures and exit status."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.rewards.selfcheck import main

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def row(truth: Any) -> dict[str, Any]:
    return {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"ground_truth": truth, "style": "rule"},
    }


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Writes the rows, checks them, and returns the exit status, what was printed and the errors."""

    def checked(rows: list[Any], function: str = "math", name: str = "data.jsonl") -> tuple[int, str, str]:
        path = tmp_path / name
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        status = main([str(path), "--function", function])
        return status, *capsys.readouterr()

    return checked


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
@pytest.mark.parametrize("function", ["math", "math_verify", "gsm8k"])
def test_numbers_in_the_schema(check: Any, name: str, function: str) -> None:
    status, output, _ = check([row("1,080"), row("1080"), row("18"), row("0.5")], function, name)
    assert status == 0 and "4 of 4 right against themselves, 4 of 4 wrong against another" in output


@pytest.mark.parametrize("function", ["math", "gsm8k"])
def test_question_and_answer(check: Any, function: str) -> None:
    rows = [{"question": "?", "answer": f"9 * 2 = <<9*2=18>>18\n#### {number}"} for number in ("18", "1,080")]
    status, output, _ = check(rows, function)
    assert status == 0 and "2 of 2 right against themselves, 2 of 2 wrong against another" in output


def test_a_truth_that_cannot_be_read_is_named(check: Any) -> None:
    status, output, _ = check([row("18"), row("None"), row("#### 5")])
    assert status == 1 and "row 1: 'None' is not right against itself" in output and "row 0" not in output


def test_a_verifier_that_accepts_another_truth_fails(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo.rewards.math.compute_score", lambda **values: {"score": 1.0, "acc": True, "pred": ""})
    status, output, _ = check([row(str(number)) for number in range(12)])
    assert status == 1 and "12 of 12 right against themselves, 0 of 12 wrong" in output
    assert "row 0: '0' is right against '1' of row 1" in output and "and 2 more" in output


@pytest.mark.parametrize("function", ["math", "math_verify", "gsm8k"])
def test_a_list_of_one_text_is_that_text(check: Any, function: str) -> None:
    status, output, _ = check([row('["3"]'), row('["34", "34.0"]'), row("12")], function)
    assert status == 0 and "3 of 3 right against themselves, 3 of 3 wrong" in output


@pytest.mark.parametrize("word", ["proof", "Proof.", "notfound", "not found", "\\text{Not found}", "see solution"])
def test_a_truth_that_is_no_answer_is_warned_of(check: Any, word: str) -> None:
    status, output, _ = check([row("12"), row(word), row("34"), row(word)])
    assert status == 0 and "of 2 of 4 rows, the first 1, is no answer; leave such rows out" in output


def test_a_text_that_many_rows_share_is_warned_of(check: Any) -> None:
    shared = [row(truth) for truth in ("nada", "C", "yes", "7", "(D)") for _ in range(6)]
    _, output, _ = check([*shared, *[row("few") for _ in range(4)]])
    warned = [line for line in output.splitlines() if "warning" in line]
    assert len(warned) == 1 and "'nada' of 6 of 34 rows, the first 0, may stand for no answer" in warned[0]


def test_a_long_truth_is_cut(check: Any) -> None:
    status, output, _ = check([row("12"), row("7" * 5000)])
    assert status == 1 and "row 1: '777" in output and len(output) < 1000


def test_one_truth_alone_has_no_other(check: Any) -> None:
    status, output, _ = check([row("18"), row("18.0")])
    assert status == 0 and "2 of 2 right against themselves, 0 of 0 wrong" in output


def problem(outputs: list[str], extra: Any = None, truth: Any = None) -> dict[str, Any]:
    tests = {"inputs": ["1 2\n", "3 4\n"], "outputs": outputs}
    return {**row(truth or json.dumps(tests)), "extra_info": extra or {"split": "train"}}


SUM, PRODUCT = "print(sum(map(int, input().split())))", "import math\nprint(math.prod(map(int, input().split())))"


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_reference_programs_are_run(check: Any, name: str) -> None:
    rows = [
        problem(["3", "7"], {"solution": f"So:\n```python\n{SUM}\n```"}),
        problem(["2", "12"], {"solution": PRODUCT}),
        problem(["-1", "-1"]),
    ]
    status, output, _ = check(rows, "code", name)
    told = "3 of 3 ground truths can be read; 2 of 2 reference solutions right on their own tests, 2 of 2"
    assert status == 0 and told in output


def test_programs_and_tests_that_are_wrong_are_named(check: Any) -> None:
    rows = [
        {**problem(["3", "7"]), "solutions": json.dumps([SUM, "not this one"])},
        {**problem(["3", "7 "]), "answer": PRODUCT},  # the first solution passes these tests too
        problem([], truth="42"),
        problem([], truth=json.dumps({"inputs": ["1"], "outputs": []})),
    ]
    status, output, _ = check(rows, "code")
    assert status == 1 and "2 of 4 ground truths can be read; 1 of 2 reference solutions right" in output
    assert "row 0: the reference solution is right on the tests of row 1 too" in output
    assert "row 1: the reference solution is not right on its own tests: 0 of 2 tests, then another output" in output
    assert "row 2: the ground truth is no problem for `code`" in output
    assert "row 3: the ground truth has 1 inputs and 0 outputs" in output


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        pytest.param([row(18)], "row 0 (counted from 0): `reward_model.ground_truth` (int 18)", id="a-number"),
        pytest.param([{"prompt": "?"}], "no column has the answer to `prompt`", id="no-schema"),
        pytest.param([], "has no rows", id="empty"),
    ],
)
def test_bad_files(check: Any, rows: list[Any], named: str) -> None:
    status, _, errors = check(rows)
    assert status == 2 and named in errors


@pytest.mark.parametrize(
    ("file", "function", "rows"),
    [
        ("gsm8k-train.jsonl", "gsm8k", 7473),
        ("gsm8k-test.jsonl", "math", 1319),
        ("aime-2024.parquet", "math_verify", 960),
    ],
)
def test_public_references(capsys: pytest.CaptureFixture[str], file: str, function: str, rows: int) -> None:
    if not (SHARED / file).is_file():
        pytest.skip("needs the public data beside the checkout")
    assert main([str(SHARED / file), "--function", function]) == 0
    assert f"{rows} of {rows} right against themselves, {rows} of {rows} wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        pytest.param(
            "return float(solution_str == '#### ' + ground_truth and extra_info['index'] >= 0)",
            0,
            [
                "right answer 1.0, wrong 0.0, empty 0.0 (3 rows; right is '#### 10')",
                "4 of 4 right against themselves, 4 of 4",
            ],
            id="right",
        ),
        pytest.param(
            "return 1.0 if solution_str[-2:] == ground_truth else None",
            1,
            [
                "gave None for the wrong, empty answer",
                "3 of 4 right",
                "row 3: '100' is not right against itself (it gave None)",
            ],
            id="right for two digits",
        ),
        pytest.param(
            "return [solution_str]", 1, ["has no score for the right answer 'Answer: 10': TypeError"], id="list"
        ),
    ],
)
def test_a_function_of_the_users_own(check: Any, tmp_path: Path, body: str, status: int, said: list[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def mine(data_source, solution_str, ground_truth, extra_info):\n    {body}\n")
    rows = [row(truth) | {"extra_info": {"index": index}} for index, truth in enumerate(("10", "20", "30", "100"))]
    found, output, _ = check(rows, f"{file}:mine")
    assert found == status and all(words in output for words in said), output


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("/no/mine.py", "--function (/no/mine.py): there is no such file"),
        ("maths", "--function (maths): give one of math, "),
    ],
)
def test_a_function_that_is_not_there_is_named(check: Any, function: str, said: str) -> None:
    status, _, error = check([row("10")], function)
    assert status == 2 and said in error
