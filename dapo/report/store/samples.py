"""Writes a run into its sample store: groups of steps, evaluations, metrics, events. A thread writes the rows
(`writer.py`). A run that goes back to a checkpoint first deletes the steps after it, so that nothing counts twice."""

import json
import math
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from dapo.algorithm.fate import TRAINED
from dapo.config.schema import LoggingConfig
from dapo.ground.redact import redacted, without_secrets
from dapo.report.store.rows import answer_rows, clean, group_row, keeps_text, prompt_row
from dapo.report.store.schema import DATABASE, TABLES, TRAIN
from dapo.report.store.writer import Write, Writer
from dapo.types import Collected, Group, Prompt

FLUSH_S = 10.0  # a checkpoint waits this long for the store
CLOSE_S = 10.0
BYTES_PER_TOKEN = 8  # of a response's arrays
ROOM_GROUPS = 5000  # whose texts one step may remove: a lowered budget may mean hours of work
PLACES = {table.name: ", ".join("?" * len(table.columns)) for table in TABLES}
# Inserts rows again without texts: an update in place would leave their pages almost empty.
TEXTLESS = {
    table.name: f"INSERT OR REPLACE INTO {table.name} SELECT {', '.join([name for name, *_ in table.columns[:-1]])}, "
    f"NULL FROM {table.name} WHERE {table.oldest} = ? AND text IS NOT NULL"
    for table in TABLES
    if table.oldest
}
# A killed start ends at its last activity. If that is a step that is deleted here, this event keeps its time.
_LAST_SIGNS = (
    "INSERT INTO events SELECT NULL, run, max(step), max(at), 'forgotten', "
    "'steps ' || min(step) || ' to ' || max(step) || ' are trained again' "
    "FROM steps JOIN runs USING (run) WHERE ended IS NULL AND run <> ? AND step > ? GROUP BY run"
)


class SampleStore:
    """Writes the store of one run directory. Calls other than `flush` and `close` return at once; none raises."""

    def __init__(
        self,
        directory: Path,
        cfg: LoggingConfig,
        *,
        warn: Callable[[str], None],
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._cfg = cfg
        self._writer = Writer(directory / DATABASE, warn=warn, guard=guard)
        self._run = 0  # number of this start; set by the thread
        self._step = 0  # the last one that was reported

    def begin(self, config: Mapping[str, Any], gpus: int = 0) -> None:
        """The program has started. config: resolved, secrets are removed. gpus: of all pools."""
        row = (time.time(), None, socket.gethostname(), os.getpid(), gpus, json.dumps(redacted(config), default=str))

        def write(connection: sqlite3.Connection) -> None:
            self._run = connection.execute(f"INSERT INTO runs VALUES ({PLACES['runs']})", (None, *row)).lastrowid or 0

        self._writer.put(write)

    def resume(self, step: int) -> None:
        """Deletes later steps, and all steps at 0, because the run goes on from there."""
        self._step = step

        def write(connection: sqlite3.Connection) -> None:
            after = step if step else -1
            connection.execute(_LAST_SIGNS, (self._run, after))
            draws = "SELECT draw FROM groups WHERE step > ?"
            connection.execute(f"DELETE FROM responses WHERE draw IN ({draws})", (after,))
            for table in ("groups", "steps", "returned", "evaluations", "metrics"):
                connection.execute(f"DELETE FROM {table} WHERE step > ?", (after,))

        self._writer.put(write)
        self.event("resume", f"goes on from step {step}" if step else "begins")

    def step(self, step: int, collected: Collected) -> None:
        self._step = step
        at = time.time()
        trained = {group.draw.index: group for group in collected.groups}  # with rewards after penalties
        groups = [
            (trained.get(group.draw.index, group), fate)
            for group, fate in zip(collected.drawn, collected.fates, strict=True)
        ]
        sums = (*_sums(groups), len(collected.returned), collected.lost_tokens)

        def write(connection: sqlite3.Connection) -> None:
            _insert(connection, "steps", [(step, self._run, at, *sums)])
            prompts = [prompt_row(TRAIN, group.draw.prompt) for group, _ in groups]
            _set_apart(connection, prompts)
            _insert(connection, "prompts", prompts)
            _insert(connection, "groups", [group_row(step, group, fate) for group, fate in groups])
            reason = collected.why_returned
            _insert(connection, "returned", [(step, draw, reason) for draw in collected.returned])
            for group, _ in groups:
                draw = group.draw.index
                _insert(connection, "responses", answer_rows((draw,), group, self._text_bytes(draw)))
            _make_room(connection, self._cfg.max_store_bytes)

        self._put(write, [group for group, _ in groups])

    def evaluation(self, step: int, name: str, groups: Sequence[Group]) -> None:
        """Stores the answers to the held-out set `name`, whose prompts are numbered by id; if its file has changed,
        other problems get other numbers. A repeated evaluation replaces the former."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM evaluations WHERE step = ? AND name = ?", (step, name))
            prompts = [group.draw.prompt for group in groups]
            numbers = _numbers(connection, name, prompts)
            rows = [prompt_row(name, replace(prompt, id=numbers[prompt.id])) for prompt in prompts]
            _insert(connection, "prompts", rows)
            for group in groups:
                prompt = group.draw.prompt.id
                key = step, name, numbers[prompt]
                _insert(connection, "evaluations", answer_rows(key, group, self._text_bytes(prompt)))
            _make_room(connection, self._cfg.max_store_bytes)

        self._put(write, groups)

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        rows = [(step, name, value) for name, value in values.items()]
        self._writer.put(lambda connection: _insert(connection, "metrics", rows))

    def event(self, kind: str, message: str) -> None:
        """Secrets are removed from the message, which may quote an address or a request."""
        step, at, told = self._step, time.time(), clean(without_secrets(message))
        self._writer.put(lambda connection: _insert(connection, "events", [(None, self._run, step, at, kind, told)]))

    def flush(self) -> None:
        self._writer.flush(FLUSH_S)

    def close(self) -> None:
        """Records the end of the program and writes what was passed so far; may be called twice."""
        ended = time.time()
        update = "UPDATE runs SET ended = ? WHERE run = ?"
        self._writer.put(lambda connection: connection.execute(update, (ended, self._run)))
        self._writer.close(CLOSE_S)

    def _text_bytes(self, number: int) -> int:
        return self._cfg.max_text_bytes if keeps_text(number, self._cfg.sample_fraction) else 0

    def _put(self, write: Write, groups: Sequence[Group]) -> None:
        size = sum(len(response.text) for group in groups for response in group.responses)
        size += BYTES_PER_TOKEN * sum(group.num_tokens for group in groups)
        self._writer.put(write, size=size)


def _insert(connection: sqlite3.Connection, table: str, rows: Iterable[tuple[object, ...]]) -> None:
    connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({PLACES[table]})", rows)


def _make_room(connection: sqlite3.Connection, max_bytes: int) -> None:
    """Removes the oldest texts until the pages in use are within the budget; SQLite reuses free pages."""
    for _ in range(ROOM_GROUPS if max_bytes else 0):
        if _used_bytes(connection) <= max_bytes:
            return
        with_text = "SELECT min(draw) FROM responses WHERE text IS NOT NULL"
        step, draw = connection.execute(f"SELECT step, draw FROM groups WHERE draw = ({with_text})").fetchone() or (
            math.inf,
            -1,
        )
        (evaluated,) = connection.execute("SELECT min(step) FROM evaluations WHERE text IS NOT NULL").fetchone()
        if evaluated is not None and evaluated < step:
            connection.execute(TEXTLESS["evaluations"], (evaluated,))
        elif draw >= 0:
            connection.execute(TEXTLESS["responses"], (draw,))
        else:
            return


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _set_apart(connection: sqlite3.Connection, rows: Iterable[tuple[object, ...]]) -> None:
    """If files have changed, prompt numbers may now belong to other prompts: moves the old prompts, with their visits,
    to numbers below 0. rows: of `prompts`, to be written."""
    for _, number, _, text, truth in rows:
        query = "SELECT text, ground_truth FROM prompts WHERE split = ? AND prompt = ?"
        if connection.execute(query, (TRAIN, number)).fetchone() not in (None, (text, truth)):
            query = "SELECT min(0, min(prompt)) - 1 FROM prompts WHERE split = ?"
            (free,) = connection.execute(query, (TRAIN,)).fetchone()
            connection.execute("UPDATE groups SET prompt = ? WHERE prompt = ?", (free, number))
            query = "UPDATE prompts SET prompt = ? WHERE split = ? AND prompt = ?"
            connection.execute(query, (free, TRAIN, number))


def _numbers(connection: sqlite3.Connection, split: str, prompts: Sequence[Prompt]) -> dict[int, int]:
    """Returns each prompt's number in a split, by id: its known number, else its id, or a new one if that is taken."""
    query = "SELECT prompt, text, ground_truth FROM prompts WHERE split = ?"
    known = {number: (text, truth) for number, text, truth in connection.execute(query, (split,))}
    asked = {prompt.id: (clean(prompt.text), clean(prompt.ground_truth)) for prompt in prompts}
    found = {number: number for number, problem in asked.items() if known.get(number) == problem}
    elsewhere = {problem: number for number, problem in known.items() if number not in found}
    later = count(max((*known, *asked), default=0) + 1)
    for number, problem in asked.items():
        if number not in found:
            there = elsewhere.pop(problem, None)
            found[number] = there if there is not None else next(later) if number in known else number
    return found


def _sums(groups: Sequence[tuple[Group, str]]) -> tuple[int, ...]:
    trained = [group.num_tokens for group, fate in groups if fate == TRAINED]
    return len(groups), len(trained), sum(group.num_tokens for group, _ in groups), sum(trained)
