"""DAPO-Math-17k as it is published: each row a hundred times, and some prompts twice with different ground truths."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.data.prompts import DataReport
from tests.support.prompts import load_prompts

KEY = "data.train_files"
COPIES = 100  # of each row, one after the other, in the published file


class CountingTokenizer:
    """A token per character, and the number of texts that went through each of its two steps."""

    chat_template = "{{ messages[0].content }}"

    def __init__(self) -> None:
        self.templated = self.tokenized = 0

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        self.templated += 1
        return messages[0]["content"]

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        self.tokenized += len(texts)
        return {"input_ids": [list(map(ord, text)) for text in texts]}


def published(question: str, truth: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"Solve the following problem.\n\n{question}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a9b6eb4-a1cb-49d1-8c1e-{index:012x}"},
    }


def write(path: Path, rows: list[dict[str, Any]], copies: int = 1) -> str:
    indices = [index for index in range(len(rows)) for _ in range(copies)]
    pq.write_table(pa.Table.from_pylist(rows).take(indices), path)
    return str(path)


def load(name: str, tokenizer: Any, max_contradictory: float = 0.1) -> tuple[list[Any], DataReport]:
    return load_prompts([name], tokenizer, max_prompt_length=2048, max_contradictory=max_contradictory, key=KEY)


def test_the_published_file_is_loaded_and_tokenized_once_per_distinct_prompt(tmp_path: Path) -> None:
    rows = [published(f"What is {i} + {i}?", str(2 * i), i) for i in range(100)]
    rows.append(published("What is 7 + 7?", "15", 200))  # another ground truth
    rows.append(published("What is 7 + 7?", "16", 201))  # and a third: still one prompt
    rows.append(published("What is 9 + 9?", "19", 202))
    rows.append(published("What is 17 + 17?", "34.0", 203))  # the same in another spelling
    rows.append(published("What is 18 + 18?", "$36$", 204))
    tokenizer = CountingTokenizer()
    prompts, report = load(write(tmp_path / "train.parquet", rows, COPIES), tokenizer)
    assert report == DataReport(rows=10_500, duplicates=10_400, contradictory=2, too_long=0, kept=98)
    assert [prompt.id for prompt in prompts] == list(range(98))
    truths = {prompt.messages[0][1].split("\n\n")[1]: prompt.ground_truth for prompt in prompts}
    assert truths == {f"What is {i} + {i}?": str(2 * i) for i in range(100) if i not in (7, 9)}
    assert prompts[0].extra_info == {"index": "9a9b6eb4-a1cb-49d1-8c1e-000000000000"}
    assert (tokenizer.templated, tokenizer.tokenized) == (98, 98)


@pytest.mark.parametrize(
    ("one", "other", "contradictory"),
    [
        pytest.param("34", "34.0", 0, id="decimal"),
        pytest.param("1080", "1,080", 0, id="thousands"),
        pytest.param("0.5", "\\frac{1}{2}", 0, id="fraction"),
        pytest.param("x", "$x$", 0, id="formula"),
        pytest.param("none", "none", 0, id="nothing-twice"),
        pytest.param("34", "35", 1, id="numbers"),
        pytest.param("34", "34.5", 1, id="near"),
        pytest.param("x", "y", 1, id="letters"),
    ],
)
def test_truths_that_differ_in_spelling_alone_are_one(one: str, other: str, contradictory: int, tmp_path: Path) -> None:
    name = write(tmp_path / "a.parquet", [published("q", one, 0), published("q", other, 1), published("p", "1", 2)])
    prompts, report = load(name, CountingTokenizer(), max_contradictory=0.5)
    assert report == DataReport(rows=3, duplicates=1, contradictory=contradictory, too_long=0, kept=2 - contradictory)
    assert prompts[0].ground_truth == (one if not contradictory else "1")


def test_contradictions_are_found_across_files(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{truth}.parquet", [published("q", truth, 0), published("p", "1", 1)]) for truth in "45"]
    _, report = load_prompts(files, CountingTokenizer(), max_prompt_length=99, max_contradictory=0.5, key=KEY)
    assert report == DataReport(rows=4, duplicates=2, contradictory=1, too_long=0, kept=1)


def test_too_many_contradictions_are_an_error_with_an_example(tmp_path: Path) -> None:
    rows = [published(str(i % 10), str(i % 10 + (i >= 18)), i) for i in range(20)]
    name = write(tmp_path / "a.parquet", rows)
    assert load(name, CountingTokenizer(), max_contradictory=0.2)[1].contradictory == 2
    with pytest.raises(ValueError, match="2 of 10 distinct prompts") as error:
        load(name, CountingTokenizer())
    for part in (
        "`data.max_contradictory` (0.1)",
        "raise it",
        f"`{KEY}`: {name}, row 8 (counted from 0) says '8'",
        f"`{KEY}`: {name}, row 18 (counted from 0) says '9'",
    ):
        assert part in str(error.value)


def test_nothing_left_but_contradictions_is_an_error(tmp_path: Path) -> None:
    rows = [published("q", "1", 0), published("q", "2", 1)]
    with pytest.raises(ValueError, match="no prompt is left of 2 rows: all 1 prompts have ground truths that contra"):
        load(write(tmp_path / "a.parquet", rows), CountingTokenizer(), max_contradictory=1.0)
    rows.append(published("p" * 3000, "1", 2))
    with pytest.raises(ValueError, match="3 rows: 1 prompts have .*, and the 1 other ones have 3030 to 3030 tokens"):
        load(write(tmp_path / "a.parquet", rows), CountingTokenizer(), max_contradictory=1.0)


MEASURE = """
import resource, sys
from tests.support.prompts import load_prompts
from tests.data.test_published_layout import CountingTokenizer
def load(name):
    return load_prompts([name], CountingTokenizer(), max_prompt_length=4096, max_contradictory=0.1, key="k")[1]
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load(sys.argv[1])
before = peak()
assert load(sys.argv[2]).rows == 5 * load(sys.argv[1]).rows
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_copies(tmp_path: Path) -> None:
    """A hundred copies of a thousand prompts, 200 MB, peak where twenty copies do: at the distinct ones and a chunk."""
    table = pa.Table.from_pylist([published(f"{i} " + chr(97 + i % 26) * 2000, str(i), i) for i in range(1000)])
    for copies in (COPIES // 5, COPIES):  # in one row group, and tiled, so that no page repeats a text that it holds
        pq.write_table(pa.concat_tables([table] * copies), tmp_path / f"{copies}.parquet", compression="none")
    many = tmp_path / f"{COPIES}.parquet"
    assert many.stat().st_size > 190e6
    command = [sys.executable, "-c", MEASURE, str(tmp_path / f"{COPIES // 5}.parquet"), str(many)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < many.stat().st_size / 3, f"{int(done.stdout) / 1024:.0f} MiB more"


TOKENIZE = """
import resource, sys
from transformers import AutoTokenizer
from dapo.config.paths import resolve_path
from dapo.data.tokenizer import token_ids
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokenizer = AutoTokenizer.from_pretrained(resolve_path("pkg://dapo.tiny/base"))
texts = ["12+34=" * 50] * 10000
token_ids(tokenizer, texts[:1000])
before = peak()
ids = token_ids(tokenizer, texts)
assert len(ids) == 10000 and {len(one) for one in ids} == {300}
print(peak() - before)
"""


def test_memory_of_tokens_is_that_of_the_tokens() -> None:
    """Three million tokens are 12 MB of int32; in one call the tokenizer would hold 300 MB more for them."""
    done = subprocess.run([sys.executable, "-c", TOKENIZE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 100e6, f"{int(done.stdout) / 1024:.0f} MiB more"
