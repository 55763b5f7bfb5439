"""The store of whole runs of the loop, read with plain sqlite3: it holds what the ledger counts, once."""

import asyncio
import json
import math
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dapo.algorithm.fate import TRAINED
from dapo.driver.recovery import run_to_end
from dapo.pools import ActorsLost, BatchRefused, Updated
from dapo.report.log import read_metrics
from dapo.sampling.draws import DROPPED
from dapo.types import Collected, Group, TrainBatch
from tests.support.driver.loops import killed, make_trainer, tiny_config
from tests.support.fakes import FakeActors, FakeRollouts
from tests.support.store.stored import one, rows, store_in

KEPT = ("steps", "groups", "responses", "returned", "evaluations", "metrics")

TIMED = {"at", "run", "seconds", "engine"}  # columns that differ between two runs; a journal knows no engine


def kinds(prompt, sample, response) -> float:
    """Prompts of every outcome, and such as change it from visit to visit."""
    if prompt.id % 7 == 0:
        return math.nan
    if prompt.id % 5 == 0:
        return float(int(response.text) % 2)
    return {0: 0.0, 1: 1.0, 2: float(sample % 2)}[prompt.id % 3]


def config(**trainer):
    cfg = tiny_config(**trainer)
    cfg.reward.overlong_filtering.enable = True
    cfg.data.gen_batch_size = 24
    return cfg


class SomeCutOff(FakeRollouts):
    async def generate(self, request):
        key = request.key
        reason = "length" if int(key.split("-")[1][1:] if "-d" in key else 1) % 4 == 0 else "stop"
        async for sample, response in super().generate(request):
            yield sample, replace(response, finish_reason=reason, engine=sample % 2, seconds=1.5)


def whole_run(directory: Path, cfg, *, actors: FakeActors | None = None) -> list[Collected]:
    """Trains to the end. Returns what its updates used up."""
    store = store_in(directory)
    trainer, actors = make_trainer(
        directory, cfg, verdict=kinds, rollouts=SomeCutOff(seed=1, max_turns=20), actors=actors, samples=store
    )
    store.begin({"seed": 0})
    used: list[Collected] = []
    report = trainer._report

    def noted(trained, mismatch):
        used.append(trained.collected)
        report(trained, mismatch)

    trainer._report = noted
    asyncio.run(trainer.run())
    trainer._logger.close()
    return used


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[Collected]]:
    directory = tmp_path_factory.mktemp("run")
    return directory, whole_run(directory, config(total_steps=20))


def test_the_store_holds_as_many_responses_and_tokens_as_the_ledger(run):
    directory, _ = run
    ledger = [line for line in read_metrics(directory / "metrics.jsonl") if "ledger/drawn" in line][-1]
    ended = {fate: ledger[f"ledger/draws_{fate}"] for fate in (TRAINED, *DROPPED)}
    assert all(ended.values()), "a fate that does not occur shows nothing"
    assert dict(rows(directory, "SELECT fate, count(*) FROM groups GROUP BY fate")) == ended
    assert one(directory, "SELECT count(*) FROM responses") == (4 * sum(ended.values()),)
    total = ledger["ledger/tokens_generated"]
    tokens = rows(directory, "SELECT fate, sum(responses.tokens) FROM responses JOIN groups USING (draw) GROUP BY fate")
    shares = {fate: ledger["ledger/goodput" if fate == TRAINED else f"ledger/dropped_{fate}"] for fate in ended}
    assert {fate: count / total for fate, count in tokens} == pytest.approx(shares)
    lost = one(directory, "SELECT sum(lost_tokens) FROM steps")[0]
    assert lost / total == pytest.approx(ledger["ledger/wasted_surplus"]) and lost > 0


def test_every_draw_has_its_step_and_why_it_was_dropped(run):
    directory, used = run
    wanted = [
        (group.draw.index, step, group.draw.prompt.id, fate, len(group.responses), group.num_tokens)
        for step, collected in enumerate(used, 1)
        for group, fate in zip(collected.drawn, collected.fates, strict=True)
    ]
    assert rows(directory, "SELECT draw, step, prompt, fate, responses, tokens FROM groups ORDER BY draw") == wanted
    trained = {group.draw.index for collected in used for group in collected.groups}
    assert {draw for draw, *_ in rows(directory, "SELECT draw FROM groups WHERE fate = 'trained'")} == trained
    returned = [(step, draw, "surplus") for step, collected in enumerate(used, 1) for draw in collected.returned]
    assert rows(directory, "SELECT * FROM returned ORDER BY step, draw") == sorted(returned) != []


def test_a_prompts_history_equals_a_recount(run):
    directory, used = run
    visits: dict[int, list[tuple[int, Group, str]]] = {}
    for step, collected in enumerate(used, 1):
        for group, fate in zip(collected.drawn, collected.fates, strict=True):
            visits.setdefault(group.draw.prompt.id, []).append((step, group, fate))
    found = rows(directory, "SELECT * FROM prompt_history ORDER BY prompt")
    assert [row[0] for row in found] == sorted(visits) and max(map(len, visits.values())) > 2
    for prompt, source, count, trained, rate, variance, last_step, fate in found:
        own = visits[prompt]
        scored = [group.accuracies for _, group, _ in own if group.accuracies]
        means = [sum(each) / len(each) for each in scored]
        variances = [sum((a - mean) ** 2 for a in each) / len(each) for each, mean in zip(scored, means, strict=True)]
        assert (source, count, last_step, fate) == ("test", len(own), own[-1][0], own[-1][2])
        assert trained == sum(each == TRAINED for _, _, each in own)
        if not means:
            assert (rate, variance) == (None, None)
            continue
        assert (rate, variance) == pytest.approx((sum(means) / len(means), sum(variances) / len(variances)))


def test_responses_are_as_they_were_scored(run):
    directory, used = run
    found = iter(rows(directory, "SELECT * FROM answers ORDER BY draw, sample"))
    for step, collected in enumerate(used, 1):
        for group, fate in zip(collected.drawn, collected.fates, strict=True):
            prompt = group.draw.prompt
            for sample, (response, score) in enumerate(zip(group.responses, group.scores, strict=True)):
                row = next(found)
                head, (engine, seconds, accuracy, reward, parts), text = row[:12], row[12:17], row[-1]
                assert head[:6] == (step, prompt.id, prompt.source, prompt.text, prompt.ground_truth, fate)
                assert head[6:10] == (group.draw.index, sample, len(response.token_ids), response.finish_reason)
                assert head[10:] == (step - 1, json.dumps([[step - 1, 0, len(response.token_ids)]]))
                assert (engine, seconds, text) == (sample % 2, 1.5, response.text)
                scorable = not math.isnan(score.accuracy)
                assert (accuracy, reward) == ((score.accuracy, score.reward) if scorable else (None, None))
                assert json.loads(parts) == {"compute_score": score.reward if scorable else None}
    assert next(found, None) is None


def test_steps_metrics_and_evaluations_are_those_of_the_other_files(run):
    directory, used = run
    lines = read_metrics(directory / "metrics.jsonl")
    wanted = {(line["step"], name): value for line in lines for name, value in line.items() if name != "step"}
    found = {
        (step, name): math.nan if value is None else value
        for step, name, value in rows(directory, "SELECT * FROM metrics")
    }
    assert found == pytest.approx(wanted, nan_ok=True)
    assert [row[0] for row in rows(directory, "SELECT step FROM steps ORDER BY step")] == list(range(1, 21))
    steps = {line["step"]: line for line in lines if "buffer/drawn" in line}
    for step, drawn, trained, tokens in rows(directory, "SELECT step, drawn, trained, trained_tokens FROM steps"):
        line = steps[step]
        assert (drawn, trained, tokens) == (line["buffer/drawn"], line["buffer/trained"], line["buffer/trained_tokens"])
    evaluated = {line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line}
    means = dict(rows(directory, "SELECT step, avg(accuracy) FROM evaluations WHERE name = 'eval' GROUP BY step"))
    assert means == pytest.approx(evaluated) and len(means) == 11
    assert one(directory, "SELECT count(*), sum(prompt < 5) FROM evaluations") == (110, 110)
    assert one(directory, "SELECT count(*) FROM prompts WHERE split = 'eval'") == (5,)
    saves = rows(directory, "SELECT step, message FROM events WHERE kind = 'save' ORDER BY event")
    assert saves == [(step, f"step {step}") for step in range(2, 21, 2)]
    assert one(directory, "SELECT config, ended > began FROM runs") == ('{"seed": 0}', 1)


def table(directory: Path, name: str) -> set[tuple]:
    with closing(sqlite3.connect(directory / "samples.sqlite")) as connection:
        found = connection.execute(f"SELECT * FROM {name}")
        same = [place for place, (column, *_) in enumerate(found.description) if column not in TIMED]
        every = [tuple(row[place] for place in same) for row in found]
    if name == "metrics":
        every = [row for row in every if not row[1].startswith(("perf/", "ledger/"))]
    if name == "returned" or name == "steps":  # what else had been started depends on timing
        every = [row[:5] for row in every] if name == "steps" else []
    assert len(set(every)) == len(every)
    return set(every)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("straight")
    whole_run(directory, config(total_steps=8))
    return directory


@pytest.mark.parametrize("crash", [(1, 7), (5, 3), (6, 30)])
def test_a_run_that_goes_on_counts_nothing_twice(tmp_path, straight, crash):
    cfg, directory = config(total_steps=8), tmp_path / "crashed"
    store = store_in(directory)
    first, _ = make_trainer(directory, cfg, verdict=kinds, rollouts=SomeCutOff(seed=2), samples=store)

    async def until_it_dies() -> None:
        first.evaluations.begin(0)
        await killed(first, *crash)
        await first.evaluations.close()

    asyncio.run(until_it_dies())
    store._writer.flush(60)  # a killed process leaves what its thread has written
    assert one(directory, "SELECT max(step) FROM steps")[0] >= crash[0]
    saved = max((int(path.name[5:]) for path in (directory / "checkpoints").glob("step_*")), default=0)
    whole_run(directory, cfg)
    for name in KEPT:
        assert table(directory, name) == table(straight, name), name
    resumed = rows(directory, "SELECT message FROM events WHERE kind = 'resume' ORDER BY event")
    assert resumed == [("begins",), (f"goes on from step {saved}" if saved else "begins",)]


class Losing(FakeActors):
    """Lost in the update from version 3, and refuses the batch of version 5, once each."""

    refused = False

    async def update(self, batch: TrainBatch) -> Updated:
        if batch.version == 3 and not self.restarted:
            raise ActorsLost("gone")
        if batch.version == 5 and not self.refused:
            self.refused = True
            raise BatchRefused("parity", "other probabilities")
        return await super().update(batch)


def test_lost_ranks_leave_the_store_as_it_would_be_without_also_around_a_refused_batch(tmp_path):
    lost, refused = tmp_path / "lost", tmp_path / "refused"
    for directory in (lost, refused):
        actors = Losing()
        actors.restarted = int(directory == refused)
        directory.mkdir()
        store = store_in(directory)

        def make(directory=directory, actors=actors, store=store):
            rollouts, cfg = SomeCutOff(seed=3), config(total_steps=8)
            return make_trainer(directory, cfg, verdict=kinds, rollouts=rollouts, actors=actors, samples=store)[0]

        asyncio.run(run_to_end(make, actors, 2))
        store.close()
        assert actors.restarted == 1 and actors.refused
    for name in KEPT:
        if name != "metrics":  # they count restarts
            assert table(lost, name) == table(refused, name), name
    resumed = rows(lost, "SELECT message FROM events WHERE kind = 'resume' ORDER BY event")
    assert resumed == [("begins",), ("goes on from step 2",)]


def test_a_checkpoint_waits_until_its_steps_are_on_disk(tmp_path):
    store = store_in(tmp_path)
    trainer, _ = make_trainer(tmp_path, config(total_steps=9), verdict=kinds, samples=store)
    go = threading.Event()

    async def run() -> None:
        await trainer.resume()
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
