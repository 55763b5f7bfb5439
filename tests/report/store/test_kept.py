"""What the store keeps when a run goes back, bounds texts or evaluates again, and what of it is a row."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest

from dapo.algorithm.fate import TRAINED
from dapo.ground.console import hearing_warnings, warn
from dapo.report.store.rows import answer_rows, group_row
from dapo.report.store.schema import TABLES
from tests.support.fakes import make_group
from tests.support.store.stored import collected_of, one, rows, store_in, with_text


@pytest.mark.parametrize(("step", "left"), [(0, []), (3, [0, 1, 2, 3]), (9, [0, 1, 2, 3, 4, 5])])
def test_going_back_takes_every_row_of_later_steps_and_no_other(tmp_path, step, left):
    store = store_in(tmp_path)
    store.begin({})
    for each in range(6):
        groups = [with_text(10 * each + number, "text") for number in range(3)]
        if each:
            store.step(each, replace(collected_of(groups), returned=(10 * each + 5,), why_returned="surplus"))
        store.metrics(each, {"a": 1.0})
        store.evaluation(each, "eval", groups)
    with hearing_warnings(lambda line: store.event("warning", line)):
        warn("engine 1 is lost")
    store.resume(step)
    store.close()
    trained = [(each,) for each in left if each]
    for table_name in ("metrics", "evaluations"):
        assert rows(tmp_path, f"SELECT DISTINCT step FROM {table_name} ORDER BY step") == [(each,) for each in left]
    for table_name in ("steps", "groups", "returned"):
        assert rows(tmp_path, f"SELECT DISTINCT step FROM {table_name} ORDER BY step") == trained
    draws = [(10 * each + number,) for (each,) in trained for number in range(3)]
    assert rows(tmp_path, "SELECT DISTINCT draw FROM responses ORDER BY draw") == draws
    assert [kind for (kind,) in rows(tmp_path, "SELECT kind FROM events ORDER BY event")] == ["warning", "resume"]
    assert one(tmp_path, "SELECT count(*) FROM runs") == (1,)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {"x" * 100: 20}),
        ({"sample_fraction": 0.25}, {"x" * 100: 4, None: 16}),
        ({"sample_fraction": 0.0}, {None: 20}),
        ({"max_text_bytes": 0}, {None: 20}),
        ({"max_text_bytes": 60}, {"x" * 30 + "\n[... 40 bytes ...]\n" + "x" * 30: 20}),
    ],
)
def test_texts_are_bounded_and_everything_else_is_kept(tmp_path, options, kept):
    store = store_in(tmp_path, **options)
    store.step(1, collected_of([with_text(index, "x" * 100) for index in range(10)]))
    store.close()
    found = Counter(text for (text,) in rows(tmp_path, "SELECT text FROM responses"))
    assert found == kept
    assert one(tmp_path, "SELECT count(*), sum(text_bytes), sum(accuracy) FROM responses") == (20, 2000, 10.0)


def test_texts_of_the_oldest_groups_make_room_for_new_ones_and_figures_stay(tmp_path):
    budget, text = 600_000, "x" * 10_000
    store = store_in(tmp_path, max_store_bytes=budget)
    sizes = []
    for step in range(1, 31):
        groups = [with_text(6 * step + number, text) for number in range(6)]  # 120 kB a step
        store.step(step, collected_of(groups))
        if step % 5 == 0:
            store.evaluation(step, "eval", groups[:3])
        store.flush()
        used = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
        sizes.append(one(tmp_path, used)[0])
    store.close()
    assert max(sizes) <= budget + 300_000, "at most a step more"
    assert sizes[-1] <= sizes[10] + 8192, "what is removed makes room for what comes, to two pages"
    for table_name, count in (("responses", 360), ("evaluations", 36)):
        assert one(tmp_path, f"SELECT count(*), sum(text_bytes), sum(tokens > 0) FROM {table_name}") == (
            count,
            10_000 * count,
            count,
        )
    texts = rows(tmp_path, "SELECT draw, count(text) FROM responses GROUP BY draw ORDER BY draw")
    kept = [draw for draw, count in texts if count]
    assert kept == list(range(kept[0], 186)) and 10 < len(kept) < 36, "the newest ones, without a gap"
    evaluated = rows(tmp_path, "SELECT step FROM evaluations WHERE text IS NOT NULL GROUP BY step")
    oldest = one(tmp_path, "SELECT step FROM groups WHERE draw = ?", kept[0])[0]
    assert [step for (step,) in evaluated] == [step for step in range(5, 31, 5) if step > oldest]


def test_a_reward_that_a_penalty_has_changed_is_the_one_that_is_kept(tmp_path):
    store = store_in(tmp_path)
    group, dropped = make_group(3, [1.0, 0.0]), make_group(4, [1.0, 1.0])
    penalized = replace(group, scores=tuple(replace(score, reward=score.reward - 0.5) for score in group.scores))
    whole = collected_of([group, dropped])
    store.step(1, replace(whole, groups=(penalized,), fates=(TRAINED, "all_correct")))
    store.close()
    found = rows(tmp_path, "SELECT draw, reward FROM responses ORDER BY draw, sample")
    assert found == [(3, 0.5), (3, -1.5), (4, 1.0), (4, 1.0)]


def test_an_evaluation_that_is_done_again_replaces_the_former(tmp_path):
    store = store_in(tmp_path)
    store.evaluation(4, "aime", [make_group(index, [1.0, 1.0]) for index in range(3)])
    store.evaluation(4, "math", [make_group(0, [1.0])])
    store.evaluation(4, "aime", [make_group(index, [0.0]) for index in range(2)])
    store.close()
    found = rows(tmp_path, "SELECT name, prompt, sample, accuracy FROM evaluations ORDER BY name, prompt")
    assert found == [("aime", 0, 0, 0.0), ("aime", 1, 0, 0.0), ("math", 0, 0, 1.0)]


def test_a_held_out_problem_keeps_its_number_when_the_files_change(tmp_path):
    store = store_in(tmp_path)
    for step, texts in enumerate(("abc", "cbdef", "ba")):
        groups = [make_group(row, [1.0]) for row in range(len(texts))]
        prompts = [replace(g.draw.prompt, text=t, ground_truth="7") for g, t in zip(groups, texts, strict=True)]
        asked = [replace(g, draw=replace(g.draw, prompt=p)) for g, p in zip(groups, prompts, strict=True)]
        store.evaluation(step, "aime", asked)
    store.close()
    query = (
        "SELECT group_concat(text, '') FROM (SELECT prompts.text FROM evaluations JOIN prompts USING (prompt) "
        "WHERE split = name AND step = ? ORDER BY prompt)"
    )
    assert [one(tmp_path, query, step)[0] for step in range(3)] == ["abc", "bcefd", "ab"]
    assert one(tmp_path, "SELECT count(*) FROM prompts WHERE split = 'aime'") == (6,)


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("", ""),
        ("a\0b", "a\u2400b"),
        ("half \ud83d of a pair", "half ? of a pair"),
        ("'; DROP TABLE responses; --", "'; DROP TABLE responses; --"),
        ("\u202e\x1b[2J\r\n", "\u202e\x1b[2J\r\n"),
    ],
)
def test_any_text_is_kept_as_a_text(text, stored, tmp_path):
    store = store_in(tmp_path)
    group = with_text(1, text)
    scores = tuple(replace(score, prediction=text) for score in group.scores)
    prompt = replace(group.draw.prompt, text=text, ground_truth=text, source=text)
    store.step(1, collected_of([replace(group, scores=scores, draw=replace(group.draw, prompt=prompt))]))
    store.event("warning", text)
    store.close()
    found = rows(tmp_path, "SELECT text, length(text), prediction, question, ground_truth, source FROM answers")
    assert found == [(stored, len(stored), stored, stored, stored, stored)] * 2
    assert rows(tmp_path, "SELECT message FROM events") == [(stored,)]


def named(table: str, row: tuple) -> dict:
    [columns] = [[name for name, _, _ in one.columns] for one in TABLES if one.name == table]
    return dict(zip(columns, row, strict=True))


def answer(group, max_bytes: int = 1000) -> dict:
    return named("responses", next(answer_rows((group.draw.index,), group, max_bytes)))


@pytest.mark.parametrize("limit", [1, 2, 7, 50, 51])
def test_a_long_text_keeps_its_beginning_and_its_end(limit):
    text = "äöü" * 10 + "end"  # two bytes a letter
    row = answer(with_text(1, text), limit)
    assert row["text_bytes"] == len(text.encode()) == 63
    start, _, rest = row["text"].partition("\n[... ")
    cut, _, end = rest.partition(" bytes ...]\n")
    assert text.startswith(start) and text.endswith(end) and len((start + end).encode()) <= limit
    assert int(cut) == 63 - 2 * (limit // 2) and (limit < 8 or end.endswith("end"))
    assert answer(with_text(1, text), 63)["text"] == text


def test_what_is_no_number_or_not_there_is_null():
    group = make_group(1, [math.nan, math.nan])
    parts = {"a": math.inf, "b": math.nan, "c": 0.5}
    scores = tuple(replace(score, parts=parts, metrics=parts, reward=-math.inf) for score in group.scores)
    no_tokens = group.responses[0].token_ids[:0]
    empty = replace(group.responses[0], policy_versions=(), token_ids=no_tokens, seconds=math.nan)
    group = replace(group, responses=(empty, empty), scores=scores)
    row = answer(group)
    assert (row["accuracy"], row["reward"]) == (None, None)
    assert json.loads(row["parts"]) == json.loads(row["metrics"]) == {"a": None, "b": None, "c": 0.5}
    assert (row["tokens"], row["version"], row["policy_versions"], row["seconds"]) == (0, None, "[]", None)
    whole = named("groups", group_row(4, group, "unscorable"))
    assert (whole["accuracy"], whole["variance"], whole["reward"], whole["version"]) == (None,) * 4
    assert (whole["scorable"], whole["tokens"], whole["longest"], whole["step"]) == (0, 0, 0, 4)
