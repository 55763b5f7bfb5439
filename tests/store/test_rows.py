"""What a model wrote, as rows: whole or bounded, and never what SQLite or UTF-8 cannot take."""

import json
import math
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from dapo.config.schema import LoggingConfig
from dapo.store.rows import answer_rows, group_row, keeps_text
from dapo.store.samples import SampleStore
from dapo.store.schema import TABLES
from tests.support.fakes import make_group
from tests.support.store.stored import collected_of, with_text

COLUMNS = {table.name: [name for name, _, _ in table.columns] for table in TABLES}


def answer(group, max_bytes: int = 1000) -> dict:
    row = next(answer_rows((group.draw.index,), group, max_bytes))
    return dict(zip(COLUMNS["responses"], row, strict=True))


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("plain", "plain"),
        ("", ""),
        ("a\0b", "a\u2400b"),
        ("half \ud83d of a pair", "half ? of a pair"),
        ("'; DROP TABLE responses; --", "'; DROP TABLE responses; --"),
        ("\u202e\x1b[2J\r\n", "\u202e\x1b[2J\r\n"),
    ],
)
def test_any_text_is_kept_as_a_text(text, stored, tmp_path):
    store = SampleStore(tmp_path, LoggingConfig(), warn=pytest.fail)
    group = with_text(1, text)
    scores = tuple(replace(score, prediction=text) for score in group.scores)
    prompt = replace(group.draw.prompt, text=text, ground_truth=text, source=text)
    store.step(1, collected_of([replace(group, scores=scores, draw=replace(group.draw, prompt=prompt))]))
    store.event("warning", text)
    store.close()
    with closing(sqlite3.connect(tmp_path / "samples.sqlite")) as connection:
        found = connection.execute("SELECT text, length(text), prediction, question, ground_truth, source FROM answers")
        assert found.fetchall() == [(stored, len(stored), stored, stored, stored, stored)] * 2
        assert connection.execute("SELECT message FROM events").fetchall() == [(stored,)]


@pytest.mark.parametrize("limit", [1, 2, 7, 50, 51])
def test_a_long_text_keeps_its_beginning_and_its_end(limit):
    text = "äöü" * 10 + "end"  # two bytes a letter
    data = text.encode()
    row = answer(with_text(1, text), limit)
    assert row["text_bytes"] == len(data) == 63
    start, _, rest = row["text"].partition("\n[... ")
    cut, _, end = rest.partition(" bytes ...]\n")
    assert text.startswith(start) and text.endswith(end) and len((start + end).encode()) <= limit
    assert int(cut) == 63 - 2 * (limit // 2) and (limit < 8 or end.endswith("end"))
    assert answer(with_text(1, text), 63)["text"] == text


def test_numbers_that_json_has_no_word_for_are_null():
    group = make_group(1, [math.nan, 1.0])
    parts = {"a": math.inf, "b": math.nan, "c": 0.5}
    scores = tuple(replace(score, parts=parts, metrics=parts, reward=-math.inf) for score in group.scores)
    row = answer(replace(group, scores=scores))
    assert (row["accuracy"], row["reward"]) == (None, None)
    assert json.loads(row["parts"]) == json.loads(row["metrics"]) == {"a": None, "b": None, "c": 0.5}


def test_a_response_without_tokens_and_a_group_without_verdicts():
    group = make_group(1, [math.nan, math.nan])
    empty = replace(
        group.responses[0], policy_versions=(), token_ids=group.responses[0].token_ids[:0], seconds=math.nan
    )
    group = replace(group, responses=(empty, empty))
    row = answer(group)
    assert (row["tokens"], row["version"], row["policy_versions"], row["seconds"]) == (0, None, "[]", None)
    whole = dict(zip(COLUMNS["groups"], group_row(4, group, "unscorable"), strict=True))
    assert (whole["accuracy"], whole["variance"], whole["reward"], whole["version"]) == (None,) * 4
    assert (whole["scorable"], whole["tokens"], whole["longest"], whole["step"]) == (0, 0, 0, 4)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.25, 0.3, 0.999, 1.0])
def test_the_fraction_that_keeps_its_texts_is_spread_evenly(fraction):
    kept = [number for number in range(2000) if keeps_text(number, fraction)]
    assert len(kept) == pytest.approx(2000 * fraction, abs=1)
    gaps = {after - before for before, after in zip(kept, kept[1:], strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1
