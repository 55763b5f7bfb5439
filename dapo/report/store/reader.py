"""Queries the sample store of a run, also while the run goes on. Rows have the column names of the tables."""

import json
import os
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dapo.algorithm.fate import DROPPED, Fate
from dapo.report.store.schema import DATABASE, GROWS, TRAIN, VERSION

Rows = list[dict[str, Any]]
# `perf/PHASE_s`; they overlap.
PHASES = ("generation", "reward", "reference", "sleep", "update", "sync", "evaluation", "driver")
# Groups of equal accuracies that are trained on because nothing is filtered; their variance may be 1e-33.
ALIKE = "fate = 'trained' AND scorable > 1 AND variance < 1e-20"
WHERE = {  # kinds of answers: condition and order
    "best": ("reward IS NOT NULL", "accuracy DESC, reward DESC, step DESC"),
    "worst": ("reward IS NOT NULL", "accuracy, reward, step DESC"),
    "longest": ("1", "tokens DESC, step DESC"),
    "truncated": ("finish_reason = 'length'", "step DESC, draw DESC, sample"),
    "unscorable": ("accuracy IS NULL", "step DESC, draw DESC, sample"),
}


class Reader:
    def __init__(self, run: Path) -> None:
        """run: the output directory, or the database. Raises ValueError if it is missing, unreadable or
        incompatible."""
        self.path = run / DATABASE if run.is_dir() else run
        if not self.path.is_file():
            raise ValueError(f"{self.path} is not there; give the `trainer.output_dir` of a run, or its {DATABASE}")
        try:
            version = self._connect("mode=ro&immutable=1" if self._is_at_rest() else "mode=ro")
        except sqlite3.Error as error:
            if not isinstance(error, sqlite3.OperationalError):
                raise ValueError(
                    f"{self.path} cannot be read ({error}); give the `trainer.output_dir` of a run, and if it is, "
                    f"`sqlite3 {self.path} .recover | sqlite3 NEW` may save most"
                ) from error
            raise ValueError(
                f"{self.path} cannot be read ({error}); where its folder cannot be written to or is on another host, "
                f"copy it and {DATABASE}-wal, and read the copy"
            ) from error
        if version not in (VERSION, *GROWS):
            self.close()
            raise ValueError(
                f"{self.path} is of version {version}, and this dapo reads version {VERSION}; read it with the dapo "
                "that has written it, or with sqlite3"
            )
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("BEGIN")  # one snapshot for all queries, while the run may go on

    def _is_at_rest(self) -> bool:
        """Whether the log is empty and the folder read-only: SQLite reads such a database only as immutable."""
        log = self.path.with_name(f"{self.path.name}-wal")
        return not os.access(self.path.parent, os.W_OK) and not (log.is_file() and log.stat().st_size)

    def _connect(self, how: str) -> int:
        self._connection = sqlite3.connect(f"file:{quote(str(self.path.absolute()))}?{how}", uri=True, timeout=10)
        return self._number("PRAGMA user_version")

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> Rows:
        """Returns a row per step, oldest first: its table's columns, fates of its groups, their answers, seconds by
        phase; NULL for a number that was not logged. `alike`: groups of one accuracy trained on because nothing is
        filtered, which also count as all correct or all wrong."""
        phases = ", ".join(f"max(value) FILTER (WHERE name = 'perf/{phase}_s') AS [{phase}]" for phase in PHASES)
        also = {
            Fate.ALL_CORRECT: f" OR {ALIKE} AND accuracy > 0.5",
            Fate.ALL_WRONG: f" OR {ALIKE} AND accuracy <= 0.5",
        }
        fates = ", ".join(f"sum(fate = '{fate}'{also.get(fate, '')}) AS {fate}" for fate in DROPPED)
        return self._all(
            f"SELECT steps.*, accuracy, length, longest, truncated, {', '.join(DROPPED)}, alike, times.* "
            "FROM steps LEFT JOIN (SELECT step, avg(accuracy) AS accuracy, "
            "sum(tokens) * 1.0 / sum(responses) AS length, max(longest) AS longest, "
            "sum(truncated) * 1.0 / sum(responses) AS truncated, "
            f"sum({ALIKE}) AS alike, {fates} FROM groups GROUP BY step) "
            "AS found USING (step) LEFT JOIN (SELECT step AS of_step, "
            f"max(value) FILTER (WHERE name = 'perf/step_s') AS seconds, {phases} "
            "FROM metrics WHERE name LIKE 'perf/%' GROUP BY step) AS times ON of_step = step ORDER BY step"
        )

    def groups(self, step: int) -> Rows:
        """Groups that a step used up, in draw order, with source and text of the prompt as `question`."""
        return self._all(f"{GROUPS} WHERE step = ? ORDER BY draw", step)

    def visits(self, prompt: int) -> Rows:
        return self._all(f"{GROUPS} WHERE groups.prompt = ? ORDER BY draw", prompt)

    def prompt(self, prompt: int) -> dict[str, Any] | None:
        """A training prompt with its text and its columns of `prompt_history`; None if it was not drawn."""
        query = (
            "SELECT prompt_history.*, text, ground_truth FROM prompt_history JOIN prompts USING (prompt) "
            f"WHERE split = '{TRAIN}' AND prompt = ?"
        )
        return next(iter(self._all(query, prompt)), None)

    def prompts(self, limit: int) -> Rows:
        """Drawn prompts with most visits first; columns of `prompt_history`, and `share` of all visits."""
        return self._all(
            "SELECT *, visits * 1.0 / (SELECT count(*) FROM groups) AS share FROM prompt_history "
            "ORDER BY visits DESC, prompt LIMIT ?",
            limit,
        )

    def group(self, draw: int) -> Rows:
        return self._all("SELECT * FROM answers WHERE draw = ? ORDER BY sample", draw)

    def answers(self, kind: str, limit: int, step: int | None = None) -> Rows:
        which, order = WHERE[kind]
        return self._all(
            f"SELECT * FROM answers WHERE {which} AND step = coalesce(?, step) ORDER BY {order} LIMIT ?", step, limit
        )

    def all_answers(self) -> Rows:
        return self._all("SELECT * FROM answers ORDER BY step, draw, sample")

    def search(self, text: str, limit: int, step: int | None = None) -> Rows:
        """Answers that contain `text`, newest first; the case of ASCII letters is ignored."""
        pattern = "%" + "".join(f"\\{letter}" if letter in "%_\\" else letter for letter in text) + "%"
        return self._all(
            "SELECT * FROM answers WHERE text LIKE ? ESCAPE '\\' AND step = coalesce(?, step) "
            "ORDER BY step DESC, draw DESC, sample LIMIT ?",
            pattern,
            step,
            limit,
        )

    def metrics(self, *patterns: str) -> dict[str, dict[int, float]]:
        """Metrics whose name fits one of the GLOB patterns, by name and step; only finite values."""
        found: dict[str, dict[int, float]] = {}
        fits = " OR ".join(["name GLOB ?"] * len(patterns))
        query = f"SELECT name, step, value FROM metrics WHERE value IS NOT NULL AND ({fits})"
        for name, step, value in self._connection.execute(f"{query} ORDER BY step", patterns):
            found.setdefault(name, {})[step] = value
        return found

    def drawn(self, since: int) -> Rows:
        """Groups from step `since` on: step, fate, and tokens, accuracies and seconds of their responses."""
        names = ("tokens", "accuracy", "seconds")
        lists = ", ".join(f"json_group_array(responses.{name}) AS {name}" for name in names)
        query = f"SELECT step, fate, {lists} FROM groups JOIN responses USING (draw) WHERE step >= ? GROUP BY draw"
        return [row | {name: json.loads(row[name]) for name in names} for row in self._all(query, since)]

    def responses(self) -> int:
        return self._number("SELECT coalesce(sum(responses), 0) FROM groups")

    def lengths(self, width: int, every: int = 1) -> list[tuple[int, int, int]]:
        """Returns (step, bin, responses) in bins of `width` tokens. every: use only one draw in so many."""
        found = self._connection.execute(
            "SELECT step, responses.tokens / ? AS bin, count(*) FROM groups JOIN responses USING (draw) "
            "WHERE draw % ? = 0 GROUP BY step, bin",
            (width, every),
        )
        return [(step, place, number) for step, place, number in found]

    def pass_rates(self, bins: int) -> list[tuple[int, int, int]]:
        """Returns (step, bin, groups) by mean accuracy. Bin 0: all wrong; `bins` + 1: all correct; equal parts
        between."""
        found = self._connection.execute(
            "SELECT step, CASE WHEN accuracy <= 0 THEN 0 WHEN accuracy >= 1 THEN :bins + 1 "
            "ELSE 1 + CAST(accuracy * :bins AS INTEGER) END AS bin, count(*) "
            "FROM groups WHERE accuracy IS NOT NULL GROUP BY step, bin",
            {"bins": bins},
        )
        return [(step, place, number) for step, place, number in found]

    def events(self, last: int) -> Rows:
        return self._all("SELECT * FROM (SELECT * FROM events ORDER BY event DESC LIMIT ?) ORDER BY event", last)

    def starts(self) -> Rows:
        """Starts of the program, oldest first, with parsed `config` and `steps`; `last`: end or last activity."""
        found = self._all(
            "SELECT runs.*, coalesce(ended, (SELECT max(at) FROM (SELECT run, at FROM steps UNION ALL "
            "SELECT run, at FROM events) AS signs WHERE signs.run = runs.run), began) AS last, "
            "(SELECT json_group_array(step) FROM steps WHERE steps.run = runs.run) AS steps FROM runs ORDER BY run"
        )
        return [{**row, "config": json.loads(row["config"]), "steps": json.loads(row["steps"])} for row in found]

    def count(self, kind: str) -> int:
        return self._number("SELECT count(*) FROM events WHERE kind = ?", kind)

    def held_out(self, step: int) -> Rows:
        """Held-out problems that policy version `step` answered: name of the set, columns of `prompts`, mean accuracy
        of the scored answers; a problem without any is left out."""
        return self._all(
            "SELECT name, prompt, prompts.text, ground_truth, source, avg(accuracy) AS accuracy FROM evaluations "
            "JOIN prompts USING (prompt) WHERE split = name AND step = ? GROUP BY name, prompt "
            "HAVING count(accuracy) > 0 ORDER BY name, prompt",
            step,
        )

    def _number(self, query: str, *values: object) -> int:
        return int(self._connection.execute(query, values).fetchone()[0])

    def _all(self, query: str, *values: object) -> Rows:
        return [dict(row) for row in self._connection.execute(query, values)]


GROUPS = (
    "SELECT groups.*, source, text AS question, ground_truth FROM groups "
    f"JOIN prompts ON prompts.prompt = groups.prompt AND split = '{TRAIN}'"
)
