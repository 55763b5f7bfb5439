"""Prompts from files: what is kept, what is refused and how it is said, and the order of draws."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from dapo.data.prompts import DataReport
from dapo.types import Prompt
from tests.support.prompts import load_prompts

KEY = "data.train_files"


def row(question: Any = "1+1", truth: Any = "2", **changes: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": question}] if isinstance(question, str) else question
    made = {
        "data_source": "sums",
        "prompt": prompt,
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": 7},
    }
    return {key: value for key, value in (made | changes).items() if value is not ...}


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


def write_json(path: Path, rows: list[Any]) -> str:
    path.write_text(json.dumps(rows, indent=1))
    return str(path)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def load(
    name: str, tokenizer: PreTrainedTokenizerFast, max_prompt_length: int = 100
) -> tuple[list[Prompt], DataReport]:
    return load_prompts([name], tokenizer, max_prompt_length=max_prompt_length, max_contradictory=0.1, key=KEY)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        pytest.param("a.parquet", write_parquet, id="parquet"),
        pytest.param("a.jsonl", write_jsonl, id="jsonl"),
        pytest.param("a.json", write_jsonl, id="json-holding-lines"),
        pytest.param("a.json", write_json, id="json-array"),
    ],
)
def test_every_format_gives_the_same_prompts(name, write, tmp_path, tokenizer):
    rows = [row("1+1"), row("2+2", "4"), row("1+1"), row("3" * 90, "0"), row("5+5", "10", data_source="other")] * 3
    prompts, report = load(write(tmp_path / name, rows), tokenizer, max_prompt_length=20)
    assert report == DataReport(rows=15, duplicates=11, contradictory=0, too_long=1, kept=3)
    assert [(p.id, p.source, p.ground_truth) for p in prompts] == [
        (0, "sums", "2"),
        (1, "sums", "4"),
        (2, "other", "10"),
    ]
    assert prompts[0].text == "<bos>u:1+1<end>a:"
    assert prompts[0].extra_info == {"index": 7}
    assert prompts[0].token_ids.dtype == np.int32


def test_tokens_are_those_of_the_chat_template_without_a_second_bos(tmp_path, tokenizer):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    prompts, _ = load(write_jsonl(tmp_path / "a.jsonl", [row(messages)]), tokenizer)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert prompts[0].token_ids.tolist() == expected
    assert expected.count(tokenizer.bos_token_id) == 1
    assert prompts[0].messages == (("system", "Add."), ("user", "1+1"))


def test_optional_columns_may_be_missing_or_empty(tmp_path, tokenizer):
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    rows = [row("1", ability=..., extra_info=...), row("2", extra_info=None), row(turns)]
    prompts, _ = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer)
    assert [prompt.extra_info for prompt in prompts] == [{}, {}, {"index": 7}]
    assert [role for role, _ in prompts[2].messages] == ["user", "assistant", "user"]


def test_a_file_longer_than_a_chunk_keeps_its_row_numbers(tmp_path, tokenizer):
    rows = [row(str(i % 100)) for i in range(9000)]
    name = write_parquet(tmp_path / "a.parquet", rows)
    assert load(name, tokenizer)[1] == DataReport(rows=9000, duplicates=8900, contradictory=0, too_long=0, kept=100)
    with pytest.raises(ValueError, match=r"row 8999 \(counted from 0\).*ground_truth` is empty"):
        load(write_parquet(tmp_path / "b.parquet", rows[:-1] + [row("9", "")]), tokenizer)


CALL = row([{"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}])
ANSWERED = row([{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "It is 2."}])
BAD_ROWS = [
    pytest.param(row(truth=""), "row 1 .*`reward_model.ground_truth` is empty", id="truth-empty"),
    pytest.param(row(truth=2), "row 1 .*must be text, not int 2", id="truth-number"),
    pytest.param(row(reward_model={"style": "rule"}), "row 1 .*ground_truth` is empty", id="truth-absent"),
    pytest.param(row(reward_model='{"ground_truth": "2"}'), "row 1 .*must be a struct .* not as JSON", id="truth-json"),
    pytest.param(row(reward_model=None), "row 1 .*`reward_model` must be a struct", id="reward-model-none"),
    pytest.param(row("  "), "row 1 .*column `prompt` is empty", id="prompt-blank"),
    pytest.param(row(prompt="1+1"), r"row 1 .*`prompt` must be a list of .*not str '1\+1'", id="prompt-text"),
    pytest.param(row([{"role": "user", "content": [1]}]), "row 1 .*`prompt` must be a list", id="prompt-content-list"),
    pytest.param(CALL, r"row 1 .*has a message with `tool_calls` \(list .*; write it into the", id="tool-calls"),
    pytest.param(ANSWERED, r"row 1 .*`prompt` ends with what an assistant says .*; remove that message", id="answered"),
    pytest.param(row(images=["a.png"]), r"row 1 .*column `images` \(list \['a.png'\]\) would be left", id="images"),
    pytest.param(row([{"role": "tool", "content": "x"}]), "row 1 .*refuses .*no tools", id="role-unknown"),
    pytest.param(row("1\ud83d"), r"row 1 .*`prompt` holds '\\ud83d', half of a character", id="prompt-cut"),
    pytest.param(row(truth="\udc00"), r"row 1 .*ground_truth` holds '\\udc00', half", id="truth-cut"),
    pytest.param(row(data_source=None), "row 1 .*`data_source` must be text", id="source-none"),
    pytest.param(row(extra_info="x"), "row 1 .*`extra_info` must be a struct", id="extra-text"),
    pytest.param(row(prompt=...), "row 1 .*`prompt` is missing .found: data_source, ability", id="column-missing"),
    pytest.param([1], "row 1 .*must be an object", id="row-list"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS)
def test_a_bad_row_is_named(bad, message, tmp_path, tokenizer):
    name = write_jsonl(tmp_path / "bad.jsonl", [row("0+1", "1"), bad])
    with pytest.raises(ValueError, match=f"`data.train_files`: {name}, {message}"):
        load(name, tokenizer)


@pytest.mark.parametrize(("name", "write"), [("a.parquet", write_parquet), ("a.jsonl", write_jsonl)])
def test_what_changes_no_problem_may_stand_beside_it(name, write, tmp_path, tokenizer):
    """Columns of a public file that nothing reads, names of speakers, and what Parquet fills up with nothing."""
    named = [{"role": "user", "content": "1", "name": "Ann", "tool_calls": None, "images": []}]
    rows = [row(named, level=3, tags=["a"], images=[], video=None), row("2", level=4, images=[])]
    prompts, _ = load(write(tmp_path / name, rows), tokenizer)
    assert [prompt.messages for prompt in prompts] == [(("user", "1"),), (("user", "2"),)]
    assert [prompt.extra_info for prompt in prompts] == [{"index": 7}, {"index": 7}]


@pytest.mark.parametrize("other", [{}, {"prompt": "1", "answer": "1"}])
def test_a_picture_in_a_parquet_file_is_refused_whatever_its_columns(other, tmp_path, tokenizer):
    rows = [(other or row(str(i))) | {"image": {"bytes": b"PNG"} if i == 70 else None} for i in range(80)]
    with pytest.raises(ValueError, match=r"a.parquet, row 70 .*column `image` \(dict \{'bytes': b'PNG'\}\) would be"):
        load(write_parquet(tmp_path / "a.parquet", rows), tokenizer)


ROW = json.dumps(row("1+1", "2")).encode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("a.parquet", b"PAR1 but no more", "a.parquet cannot be read as Parquet", id="parquet-broken"),
        pytest.param("a.jsonl", b"{not json\n", "row 0 .*not valid JSON", id="jsonl-broken"),
        pytest.param("a.jsonl", b"\n[" + b"9" * 5000 + b"]", "a.jsonl cannot be read .*4300 digits", id="jsonl-huge"),
        pytest.param("a.jsonl", b"\n" + b'{"a":' * 100000, "row 1 .*cannot be read .*recursion", id="jsonl-nested"),
        pytest.param("a.json", b"[" + ROW + b", {]", "a.json: not valid JSON .*char", id="json-array-broken"),
        pytest.param("a.json", b" [ ] x", "a.json: not valid JSON .Extra data", id="json-array-more"),
        pytest.param("a.json", b" [ ]\n", "has no rows", id="json-array-empty"),
        pytest.param("a.json", b"\xff\xfe", "cannot be read as UTF-8", id="json-binary"),
        pytest.param("a.jsonl", b"", "has no rows", id="jsonl-empty"),
        pytest.param("a.csv", b"a,b\n", "is neither .parquet nor .json", id="csv"),
    ],
)
def test_an_unreadable_file_is_named(name, content, message, tmp_path, tokenizer):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load(str(tmp_path / name), tokenizer)
    assert f"`{KEY}`: {tmp_path / name}" in str(error.value)


def test_no_prompt_left_gives_counts_lengths_and_the_key(tmp_path, tokenizer):
    name = write_jsonl(tmp_path / "a.jsonl", [row("1" * 10), row("1" * 10), row("2" * 30)])
    with pytest.raises(
        ValueError,
        match=r"3 rows: 0 have .*, 2 are longer than `data.max_prompt_length` \(9\), the shortest of 16 tokens",
    ):
        load(name, tokenizer, max_prompt_length=9)


def test_a_tokenizer_without_chat_template_is_refused(tmp_path, tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="`model.path`: its tokenizer has no chat template"):
        load(write_jsonl(tmp_path / "a.jsonl", [row()]), bare)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}a:", "what the user says"),
        ("{{ messages[-1].content }}", r"what the system says, .*\(str 'Add\.'\)"),
    ],
)
def test_a_template_that_leaves_out_what_is_said_is_refused(tmp_path, tokenizer, template, said):
    made = copy.deepcopy(tokenizer)
    made.chat_template = template
    system = {"role": "system", "content": "Add."}
    rows = [row("9"), row([system, {"role": "user", "content": "9"}]), row([system, {"role": "user", "content": "0"}])]
    name = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=rf"a.jsonl, row \d \(counted from 0\): the chat template .*{said}"):
        load(name, made)


def test_many_prompts_that_are_too_long_are_refused(tmp_path, tokenizer):
    name = write_jsonl(tmp_path / "a.jsonl", [row("1" * length) for length in (1, 2, 3, 30)])
    options = {"max_prompt_length": 20, "max_contradictory": 0.1, "key": KEY}
    assert load_prompts([name], tokenizer, **options, max_too_long=0.25)[1].too_long == 1
    longest = len(load_prompts([name], tokenizer, **{**options, "max_prompt_length": 99})[0][-1].token_ids)
    said = rf"1 of 4 prompts are longer than `data.max_prompt_length` \(20\).*\(0.1\).*\({longest} tokens are enough"
    with pytest.raises(ValueError, match=said):
        load_prompts([name], tokenizer, **options, max_too_long=0.1)


@pytest.mark.usefixtures("cache")
def test_a_folder_goes_through_datasets(tmp_path, tokenizer, monkeypatch):
    """The same call as for a hub name, with real files and no network."""
    folder = tmp_path / "sums"
    folder.mkdir()
    write_parquet(folder / "train-00000.parquet", [row("1"), row("1"), row("2")])
    prompts, report = load(str(folder), tokenizer)
    assert report == DataReport(rows=3, duplicates=1, contradictory=0, too_long=0, kept=2)
    assert prompts[1].text == "<bos>u:2<end>a:"
    write_parquet(folder / "test-00000.parquet", [row("3")])
    with pytest.raises(ValueError, match="has the splits test, train; name one, as in .*/sums:test"):
        load(str(folder), tokenizer)
    monkeypatch.chdir(tmp_path)
    for name in (f"{folder}:test", "sums:test", f"{folder}:test[:1]"):
        assert [prompt.messages[0][1] for prompt in load(name, tokenizer)[0]] == ["3"]
    with pytest.raises(ValueError, match='Unknown split "tset"'):
        load(f"{folder}:tset", tokenizer)
    with pytest.raises(ValueError, match=r"does not exist in .*; did you mean .*train-00000.parquet\?$"):
        load(f"{folder}/train-00000.parquet:train", tokenizer)


@pytest.mark.usefixtures("cache")
def test_a_folder_of_save_to_disk(tmp_path, tokenizer):
    import datasets

    saved = datasets.Dataset.from_list([row("1"), row("1"), row("2")]).select([2, 0, 1])
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "two")
    for name, messages in {"one": ["2", "1"], "two:train": ["2", "1"], "two:test": ["2"]}.items():
        assert [prompt.messages[0][1] for prompt in load(f"{tmp_path}/{name}", tokenizer)[0]] == messages
    with pytest.raises(ValueError, match="has the splits test, train; name one, as in .*/two:test"):
        load(f"{tmp_path}/two", tokenizer)


@pytest.mark.usefixtures("cache")
def test_a_data_set_of_several_configurations(tmp_path, tokenizer):
    """GSM8K has two, main and socratic; without one of them it cannot be loaded."""
    head = "---\nconfigs:\n"
    for name in ("main", "socratic"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for split in ("train", "test"):
            write_parquet(tmp_path / "set" / name / f"{split}.parquet", [row(f"{name} {split}")])
        head += f"- config_name: {name}\n  data_files:\n"
        head += "".join(f"  - split: {split}\n    path: {name}/{split}.parquet\n" for split in ("train", "test"))
    (tmp_path / "set" / "README.md").write_text(head + "---\n")
    with pytest.raises(ValueError, match=r"(?s)\['main', 'socratic'\].* or OWNER/NAME:CONFIG:SPLIT"):
        load(f"{tmp_path / 'set'}:test", tokenizer)
    prompts, _ = load(f"{tmp_path / 'set'}:socratic:test", tokenizer)
    assert [prompt.messages[0][1] for prompt in prompts] == ["socratic test"]
