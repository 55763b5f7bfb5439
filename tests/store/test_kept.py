"""What the store keeps when a run goes back, waits, loses its ranks, bounds texts or evaluates again."""

import asyncio
import sqlite3
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest

from dapo.measure.clock import Span
from dapo.sampling.draws import TRAINED
from dapo.store.reader import Reader
from tests.support.driver.loops import make_trainer
from tests.support.fakes import make_group
from tests.support.store.stored import collected_of, with_text
from tests.support.store.whole_runs import config, kinds, one, rows, store_in


@pytest.mark.parametrize(("step", "left"), [(0, []), (3, [0, 1, 2, 3]), (9, [0, 1, 2, 3, 4, 5])])
def test_going_back_takes_every_row_of_later_steps_and_no_other(tmp_path, step, left):
    store = store_in(tmp_path)
    store.begin({})
    for each in range(6):
        groups = [with_text(10 * each + number, "text") for number in range(3)]
        if each:
            store.step(each, replace(collected_of(groups), returned=(10 * each + 5,), why_returned="surplus"))
            store.spans(each, [Span(lane="update", began=0.0, ended=1.0, level=1.0)])
        store.metrics(each, {"a": 1.0})
        store.evaluation(each, "eval", groups)
    store.event("warning", "engine 1 is lost")
    store.resume(step)
    store.close()
    trained = [each for each in left if each]
    for table_name in ("metrics", "evaluations"):
        assert rows(tmp_path, f"SELECT DISTINCT step FROM {table_name} ORDER BY step") == [(each,) for each in left]
    for table_name in ("steps", "groups", "returned", "spans"):
        assert rows(tmp_path, f"SELECT DISTINCT step FROM {table_name} ORDER BY step") == [(each,) for each in trained]
    draws = [(10 * each + number,) for each in trained for number in range(3)]
    assert rows(tmp_path, "SELECT DISTINCT draw FROM responses ORDER BY draw") == draws
    assert [kind for (kind,) in rows(tmp_path, "SELECT kind FROM events ORDER BY event")] == ["warning", "resume"]
    assert one(tmp_path, "SELECT count(*) FROM runs") == (1,)


def test_a_checkpoint_waits_until_its_steps_are_on_disk(tmp_path):
    store = store_in(tmp_path)
    trainer, _ = make_trainer(tmp_path, config(total_steps=9), verdict=kinds, samples=store)
    go = threading.Event()

    async def run() -> None:
        await trainer._resume()
        await trainer.step()
        store._writer.put(lambda connection: go.wait(60))
        store.metrics(1, {"last": 1.0})
        saving = asyncio.create_task(trainer.save())
        for _ in range(30):
            await asyncio.sleep(0.01)
        assert not saving.done() and not trainer.saver._store.steps()
        go.set()
        await saving
        assert trainer.saver._store.steps() == [1]
        assert rows(tmp_path, "SELECT value FROM metrics WHERE name = 'last'") == [(1.0,)]
        await trainer.stream.close()

    asyncio.run(run())
    store.close()


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


def test_a_reward_that_a_penalty_has_changed_is_the_one_that_is_kept(tmp_path):
    store = store_in(tmp_path)
    group = make_group(3, [1.0, 0.0])
    penalized = replace(group, scores=tuple(replace(score, reward=score.reward - 0.5) for score in group.scores))
    dropped = make_group(4, [1.0, 1.0])
    whole = collected_of([group, dropped])
    store.step(1, replace(whole, groups=(penalized,), fates=(TRAINED, "all_correct")))
    store.close()
    assert rows(tmp_path, "SELECT draw, reward FROM responses ORDER BY draw, sample") == [
        (3, 0.5),
        (3, -1.5),
        (4, 1.0),
        (4, 1.0),
    ]


def test_an_evaluation_that_is_done_again_replaces_the_former(tmp_path):
    store = store_in(tmp_path)
    store.evaluation(4, "aime", [make_group(index, [1.0, 1.0]) for index in range(3)])
    store.evaluation(4, "math", [make_group(0, [1.0])])
    store.evaluation(4, "aime", [make_group(index, [0.0]) for index in range(2)])
    store.close()
    found = rows(tmp_path, "SELECT name, prompt, sample, accuracy FROM evaluations ORDER BY name, prompt")
    assert found == [("aime", 0, 0, 0.0), ("aime", 1, 0, 0.0), ("math", 0, 0, 1.0)]


def test_a_start_that_was_killed_keeps_its_time_when_its_steps_are_forgotten(tmp_path):
    killed = store_in(tmp_path)
    killed.begin({}, 8)
    killed.resume(0)
    for step in range(1, 5):
        killed.step(step, collected_of([with_text(step, "text")]))
    killed.close()
    with closing(sqlite3.connect(tmp_path / "samples.sqlite")) as connection, connection:
        connection.execute("UPDATE runs SET began = 50, ended = NULL")
        connection.execute("UPDATE events SET at = 60")
        connection.execute("UPDATE steps SET at = 100 * step")
    again = store_in(tmp_path)
    again.begin({}, 8)
    again.resume(2)
    again.close()
    with Reader(tmp_path) as store:
        first, second = store.starts()
    assert (first["began"], first["last"], first["steps"]) == (50, 400, [1, 2]) and second["last"] == second["ended"]
    query = "SELECT run, step, at, message FROM events WHERE kind = 'forgotten'"
    assert one(tmp_path, query) == (1, 4, 400, "steps 3 to 4 are trained again")


def test_a_held_out_problem_keeps_its_number_when_the_files_change(tmp_path):
    store = store_in(tmp_path)
    for step, texts in enumerate(("abc", "cbdef", "ba")):
        groups = [make_group(row, [1.0]) for row in range(len(texts))]
        draws = [replace(group.draw, prompt=replace(group.draw.prompt, ground_truth="7")) for group in groups]
        pairs = zip(groups, draws, texts, strict=True)
        asked = [replace(g, draw=replace(d, prompt=replace(d.prompt, text=text))) for g, d, text in pairs]
        store.evaluation(step, "aime", asked)
    store.close()
    query = "SELECT prompts.text FROM evaluations JOIN prompts USING (prompt) WHERE split = name AND step = ?"
    assert ["".join(text for (text,) in rows(tmp_path, f"{query} ORDER BY prompt", step)) for step in range(3)] == [
        "abc",
        "bcefd",
        "ab",
    ]
    assert one(tmp_path, "SELECT count(*) FROM prompts WHERE split = 'aime'") == (6,)


def test_warnings_are_events_while_they_are_heard(tmp_path, capsys):
    from dapo.report.console import hearing_warnings, warn

    store = store_in(tmp_path)
    warn("before")
    with hearing_warnings(lambda line: store.event("warning", line)):
        warn("engine 1 is lost")
    warn("after")
    store.close()
    assert rows(tmp_path, "SELECT kind, message FROM events") == [("warning", "engine 1 is lost")]
    assert capsys.readouterr().err == "before\nengine 1 is lost\nafter\n"
