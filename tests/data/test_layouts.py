"""Columns of public data sets: found by their names, read alike from any kind of file, refused by name."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.data.files import read_chunks
from dapo.data.layouts import Reading, layout_of

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
USER = [{"role": "user", "content": "1+1"}]
FRACTION = "\\frac{4}{2}"
WORKED = "We have $1+1=\\boxed{2}$, so \\boxed{\\frac{4}{2}}."


def parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row, default=float) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


ROWS = [
    pytest.param({"prompt": "1+1", "answer": "2"}, "trl", USER, "2", {}, id="trl-text"),
    pytest.param({"prompt": CHAT, "answer": "2", "level": 3}, "trl", CHAT, "2", {"level": 3}, id="trl-messages"),
    pytest.param({"prompt": json.dumps(CHAT), "answer": "2"}, "trl", CHAT, "2", {}, id="trl-messages-in-text"),
    pytest.param({"question": json.dumps(USER[0]), "solution": "2"}, "qa", USER, "2", {}, id="qa-message-in-text"),
    pytest.param({"prompt": "[1]+1", "answer": "2"}, "trl", [USER[0] | {"content": "[1]+1"}], "2", {}, id="trl-list"),
    pytest.param({"prompt": "1+1", "solution": WORKED}, "trl", USER, FRACTION, {}, id="trl-solution"),
    pytest.param({"prompt": "1+1", "ground_truth": 2}, "trl", USER, "2", {}, id="trl-number"),
    pytest.param({"prompt": "1+1", "answer": 1e-05}, "trl", USER, "0.00001", {}, id="trl-small-number"),
    pytest.param({"prompt": "1+1", "answer": -1.5e16}, "trl", USER, "-15000000000000000", {}, id="trl-large-number"),
    pytest.param({"prompt": "1+1", "solution": ["\\boxed{2}"]}, "trl", USER, "2", {}, id="trl-list-of-one"),
    pytest.param({"prompt": "1+1", "answer": "It is\n#### 1,234"}, "trl", USER, "1234", {}, id="trl-marked"),
    pytest.param({"prompt": "1+1", "solution": "#### So\n\\boxed{2}"}, "trl", USER, "2", {}, id="trl-heading-and-box"),
    pytest.param({"question": "1+1", "solution": WORKED}, "qa", USER, FRACTION, {}, id="qa-solution"),
    pytest.param({"question": "1+1", "ground_truth": 2, "n": 1}, "qa", USER, "2", {"n": 1}, id="qa-ground-truth"),
    pytest.param({"question": "1+1", "answer": "It is\n#### 1,234"}, "gsm8k", USER, "1234", {}, id="gsm8k"),
    pytest.param({"question": "1+1", "answer": "2"}, "qa", USER, "2", {}, id="qa-by-its-first-row"),
    pytest.param({"problem": "1+1", "type": "a", "solution": WORKED}, "math", USER, FRACTION, {"type": "a"}, id="math"),
    pytest.param({"problem": "1+1", "solution": WORKED, "answer": "2"}, "math", USER, "2", {}, id="math-answer"),
    pytest.param({"problem": "1+1", "solution": WORKED, "answer": " "}, "math", USER, FRACTION, {}, id="math-blank"),
    pytest.param({"problem": "1+1", "solution": "So $\\boxed 2$."}, "math", USER, "2", {}, id="math-bare-box"),
    pytest.param({"prompt": "1+1", "answer": Decimal("1E-7")}, "trl", USER, "0.0000001", {}, id="trl-decimal"),
]


@pytest.mark.parametrize("write", [parquet, jsonl])
@pytest.mark.parametrize("entry", ["", "mine"])
@pytest.mark.parametrize(("row", "name", "messages", "truth", "extra"), ROWS)
def test_a_layout_is_found_by_its_columns(tmp_path, write, entry, row, name, messages, truth, extra):
    for format in ("auto", name):
        (one,) = read_chunks(write(tmp_path, [row]), "data.train_files", Reading(format=format, entry=entry))
        assert one.prompts == [messages] and one.reward_models == [{"ground_truth": truth}]
        assert one.rest(0)["data_source"] == (entry or name)
        assert one.rest(0)["extra_info"] == extra


def test_a_data_source_of_the_rows_stays(tmp_path):
    row = {"question": "1+1", "answer": "#### 2", "data_source": "openai/gsm8k"}
    (one,) = read_chunks(parquet(tmp_path, [row]), "data.train_files", Reading(entry="mine"))
    assert one.rest(0)["data_source"] == "openai/gsm8k" and one.rest(0)["extra_info"] == {}


@pytest.mark.parametrize(
    ("columns", "format", "said"),
    [
        (["question", "answer", "problem"], "auto", r"fit gsm8k \(question; answer\) and math .* name one of them as"),
        (["prompt", "answer", "question"], "auto", r"fit trl .* and gsm8k .*; name one of them as `format`"),
        (["query", "reply"], "auto", r"\(found: query, reply\) are those of no format; .* trl \(prompt; "),
        (["Question", "Answer"], "auto", r"did you mean `question` for `Question` and `answer` for `Answer`\?"),
        (["question", "id"], "auto", r"no column has the answer to `question` \(found: question, id\)"),
        (["prompt", "reward_model"], "auto", r"column `data_source` is missing"),
        (["question", "answer"], "math", r"\(found: question, answer\) are not those of `format` math \(problem; "),
        (["question", "answer"], "verl", r"`data_source`, `prompt`, `reward_model` is missing"),
    ],
)
def test_columns_that_fit_none_or_several_are_refused(columns, format, said):
    with pytest.raises(ValueError, match=rf"^FILE: .*{said}"):
        layout_of(columns, format, "FILE")


def test_a_named_layout_decides_between_several():
    found = layout_of(["question", "answer", "problem"], "math", "FILE")
    assert found is not None and found.name == "math"
    assert layout_of(["data_source", "prompt", "reward_model", "answer"], "auto", "FILE") is None
    trl = layout_of(["data_source", "prompt", "reward_model", "answer"], "trl", "FILE")
    assert trl is not None and trl.name == "trl"


@pytest.mark.parametrize("write", [parquet, jsonl])
@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ({"question": "1", "answer": "#### 1"}, {"question": "1+1", "answer": "2"}, "column `answer` lacks a final a"),
        ({"problem": "1", "solution": "\\boxed{1}"}, {"problem": "1", "solution": "1"}, r"`solution` lacks a \\boxed"),
        ({"prompt": "1", "answer": "1"}, {"prompt": "1", "answer": None}, "it lacks an answer, which `format` trl"),
        ({"prompt": "1", "answer": "1"}, {"prompt": str(USER), "answer": "1"}, "looks like messages and is no JSON"),
        ({"prompt": "1", "answer": "1"}, {"prompt": None, "answer": "1"}, "column `prompt` must be text or messages"),
        ({"prompt": "1", "answer": ["1"]}, {"prompt": "1+1", "answer": ["2", "3"]}, r"text, .*not list \['2', '3'\];"),
        ({"prompt": "1", "answer": ["1"]}, {"prompt": "1+1", "answer": []}, r"`answer` must be .*, not list \[\]"),
        ({"prompt": "1", "answer": 1.0}, {"prompt": "1+1", "answer": float("nan")}, "`answer` .*, not float nan"),
    ],
)
def test_a_bad_row_is_named_with_its_column(tmp_path, write, good, bad, said):
    name = write(tmp_path, [good, bad])
    with pytest.raises(ValueError, match=rf"`KEY`: {name}, row 1 \(counted from 0\): .*{said}"):
        list(read_chunks(name, "KEY", Reading()))


@pytest.mark.parametrize("answer", [{"a": 2}, True, [[2]], [None], [True]])
def test_an_answer_that_nothing_could_equal_is_refused(tmp_path, answer):
    name = parquet(tmp_path, [{"prompt": "1+1", "answer": answer}])
    with pytest.raises(ValueError) as error:
        list(read_chunks(name, "KEY", Reading()))
    assert "row 0 (counted from 0): column `answer` must be" in str(error.value)
    assert f"not {type(answer).__name__} {answer!r}" in str(error.value)


PROCESSED = {  # DAPO-Math-17k-Processed of open-r1
    "prompt": "1+1",
    "solution": "2",
    "data_source": "math_dapo",
    "source_prompt": [{"role": "user", "content": "Solve: 1+1"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b", "answer": "two"},
}


@pytest.mark.parametrize("write", [parquet, jsonl])
@pytest.mark.parametrize("solution", ["2", "It is two, as anyone can see."])
def test_a_prompt_of_text_next_to_a_reward_model_is_read(tmp_path, write, solution):
    """The truth is that of the reward model: a worked solution may have no box."""
    for format in ("auto", "trl"):
        name = write(tmp_path, [PROCESSED | {"solution": solution}])
        (one,) = read_chunks(name, "KEY", Reading(format=format))
        assert one.prompts == [USER] and one.reward_models == [{"ground_truth": "2"}]
        rest = one.rest(0)
        kept = {name: PROCESSED[name] for name in ("source_prompt", "ability")}
        assert rest["data_source"] == "math_dapo" and rest["extra_info"] == kept | PROCESSED["extra_info"]


def test_a_prompt_of_messages_next_to_a_solution_stays_verls(tmp_path):
    (one,) = read_chunks(jsonl(tmp_path, [PROCESSED | {"prompt": CHAT, "solution": "3"}]), "KEY", Reading())
    assert one.prompts == [CHAT] and one.reward_models == [PROCESSED["reward_model"]]
    assert one.rest(0)["extra_info"] == PROCESSED["extra_info"]
