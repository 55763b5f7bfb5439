"""Declares the sample store's tables and views, each column with its meaning; `python -m dapo.report.store` prints
README.md."""

from collections.abc import Iterator
from dataclasses import dataclass

from dapo.algorithm.fate import DROPPED, Fate

DATABASE = "samples.sqlite"
VERSION = 6  # `PRAGMA user_version`; databases of other versions are neither written nor read, except for
GROWS = (2, 3, 4, 5)  # these, which only lack tables or indexes (a writer adds them) or have some more
TRAIN = "train"  # the split of the prompts that are trained on
UNNAMED = "eval"  # the split of a held-out set without a name of its own

Columns = tuple[tuple[str, str, str], ...]  # name, type and constraint, meaning


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """key: primary key over several columns. small: without a rowid. oldest: column by which rows lose their `text`."""

    name: str
    text: str
    columns: Columns
    key: str = ""
    small: bool = False
    indexes: tuple[str, ...] = ()
    oldest: str = ""

    def statements(self) -> Iterator[str]:
        parts = [f"{name} {kind}" for name, kind, _ in self.columns]
        parts += [f"PRIMARY KEY ({self.key})"] if self.key else []
        yield f"CREATE TABLE IF NOT EXISTS {self.name} ({', '.join(parts)}){' WITHOUT ROWID' if self.small else ''}"
        for column in self.indexes:
            yield f"CREATE INDEX IF NOT EXISTS {self.name}_by_{column} ON {self.name} ({column})"
        if self.oldest:
            name = f"{self.name}_with_text"
            yield f"CREATE INDEX IF NOT EXISTS {name} ON {self.name} ({self.oldest}) WHERE text IS NOT NULL"


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """columns: those of its query, in order, except those of a table."""

    name: str
    text: str
    columns: Columns
    query: str

    def statements(self) -> Iterator[str]:
        yield f"CREATE VIEW IF NOT EXISTS {self.name} AS {self.query}"


ANSWER: Columns = (
    ("tokens", "INTEGER NOT NULL", "tokens that the policy sampled"),
    ("finish_reason", "TEXT NOT NULL", "`stop`, or `length` at the cap"),
    ("version", "INTEGER", "policy version of the last token; NULL without tokens"),
    ("policy_versions", "TEXT NOT NULL", "JSON: [version, first token, token after the last] of each span"),
    ("engine", "INTEGER NOT NULL", "that ended it; -1: not known, of an earlier start"),
    ("seconds", "REAL", "in engines, waiting included; NULL: as above"),
    ("accuracy", "REAL", "0..1; NULL: unscorable"),
    ("reward", "REAL", "penalties included; NULL: unscorable"),
    ("parts", "TEXT NOT NULL", "JSON: score by reward function"),
    ("metrics", "TEXT NOT NULL", "JSON: their other numbers, as LABEL/KEY"),
    ("prediction", "TEXT NOT NULL", "the extracted answer, 1,024 bytes at most"),
    ("failure", "TEXT NOT NULL", "why it has no verdict, or which limit made it wrong; else empty"),
    ("text_bytes", "INTEGER NOT NULL", "of the whole text"),
    (
        "text",
        "TEXT",
        "the response; NULL: not kept",
    ),
)

TABLES = (
    Table(
        name="runs",
        text="A row per start of the program.",
        columns=(
            ("run", "INTEGER PRIMARY KEY", "counts starts from 1"),
            ("began", "REAL NOT NULL", "time"),
            ("ended", "REAL", "NULL: running, or killed"),
            ("host", "TEXT NOT NULL", "where the driver ran"),
            ("pid", "INTEGER NOT NULL", "the driver's process"),
            ("gpus", "INTEGER NOT NULL", "of all pools"),
            ("config", "TEXT NOT NULL", "JSON: the resolved configuration"),
        ),
    ),
    Table(
        name="steps",
        text="A row per step. Its seconds are in `metrics`.",
        columns=(
            ("step", "INTEGER PRIMARY KEY", "policy version after the update"),
            ("run", "INTEGER NOT NULL", "the start that took it"),
            ("at", "REAL NOT NULL", "when it ended"),
            ("drawn", "INTEGER NOT NULL", "groups that it used up"),
            ("trained", "INTEGER NOT NULL", "groups trained on"),
            ("tokens", "INTEGER NOT NULL", "of the groups that it used up"),
            ("trained_tokens", "INTEGER NOT NULL", "of the groups trained on"),
            ("returned", "INTEGER NOT NULL", "draws that went back to the stream"),
            ("lost_tokens", "INTEGER NOT NULL", "that those draws had generated"),
        ),
    ),
    Table(
        name="prompts",
        text="A row per prompt that was drawn or evaluated.",
        columns=(
            ("split", "TEXT NOT NULL", f"`{TRAIN}`, or the name of a held-out set, `{UNNAMED}` where it has none"),
            (
                "prompt",
                "INTEGER NOT NULL",
                "number within its split; below 0: the file has changed since",
            ),
            ("source", "TEXT NOT NULL", "`data_source` of the row"),
            ("text", "TEXT NOT NULL", "after the chat template"),
            ("ground_truth", "TEXT NOT NULL", "the right answer"),
        ),
        key="split, prompt",
    ),
    Table(
        name="groups",
        text="A row per group that a step used up. A draw is a visit to a prompt; it has one group.",
        columns=(
            ("draw", "INTEGER PRIMARY KEY", "number, from 0 over the whole run"),
            ("step", "INTEGER NOT NULL", "that used it up"),
            ("prompt", "INTEGER NOT NULL", f"of split `{TRAIN}`"),
            (
                "fate",
                "TEXT NOT NULL",
                f"`{Fate.TRAINED}`, or why it was dropped: {', '.join(f'`{fate}`' for fate in DROPPED)} "
                "(`dapo/algorithm/fate.py`)",
            ),
            ("responses", "INTEGER NOT NULL", "how many"),
            ("scorable", "INTEGER NOT NULL", "how many have a verdict"),
            ("accuracy", "REAL", "mean over these: the pass rate of this visit"),
            ("variance", "REAL", "of their accuracies, over their number"),
            ("reward", "REAL", "mean over the responses that have one"),
            ("tokens", "INTEGER NOT NULL", "of all responses"),
            ("longest", "INTEGER NOT NULL", "tokens of the longest"),
            ("truncated", "INTEGER NOT NULL", "responses that ran into the cap"),
            ("version", "INTEGER", "latest policy version in it"),
        ),
        indexes=("step", "prompt"),
    ),
    Table(
        name="responses",
        text="A row per response of these groups.",
        columns=(
            ("draw", "INTEGER NOT NULL", "its group"),
            ("sample", "INTEGER NOT NULL", "number within the group"),
            *ANSWER,
        ),
        key="draw, sample",
        oldest="draw",
    ),
    Table(
        name="returned",
        text="A row per draw that starts again later.",
        columns=(
            ("step", "INTEGER NOT NULL", "after whose batch"),
            ("draw", "INTEGER NOT NULL", "which"),
            ("reason", "TEXT NOT NULL", "`surplus` (beyond the batch, at staleness 0) or `stale` (too old)"),
        ),
        key="step, draw",
        small=True,
    ),
    Table(
        name="evaluations",
        text="A row per answer to a held-out prompt. Accuracies are in `metrics`.",
        columns=(
            ("step", "INTEGER NOT NULL", "policy version that was evaluated"),
            ("name", "TEXT NOT NULL", "of the held-out set"),
            ("prompt", "INTEGER NOT NULL", "of the split of that name"),
            ("sample", "INTEGER NOT NULL", "number among the answers to it"),
            *ANSWER,
        ),
        key="step, name, prompt, sample",
        oldest="step",
    ),
    Table(
        name="metrics",
        text="The lines of `metrics.jsonl`, a row per number.",
        columns=(
            ("step", "INTEGER NOT NULL", "policy version"),
            ("name", "TEXT NOT NULL", "as in `metrics.jsonl`"),
            ("value", "REAL", "NULL: not finite"),
        ),
        key="step, name",
        small=True,
    ),
    Table(
        name="events",
        text="What happened, in order of time.",
        columns=(
            ("event", "INTEGER PRIMARY KEY", "counts them"),
            ("run", "INTEGER NOT NULL", "the start in which it happened"),
            ("step", "INTEGER NOT NULL", "the last reported step"),
            ("at", "REAL NOT NULL", "when"),
            (
                "kind",
                "TEXT NOT NULL",
                "`inputs` (what a start reads), `resume` (also at the first start), `save`, `failed_save`, `warning` "
                "(faults and restarts), `forgotten` (steps of a start that was killed)",
            ),
            ("message", "TEXT NOT NULL", "what was told"),
        ),
    ),
)

VIEWS = (
    View(
        name="prompt_history",
        text="A row per training prompt. Its single visits are in `groups`.",
        columns=(
            ("prompt", "", "number"),
            ("source", "", "`data_source` of the row"),
            ("visits", "", "groups used up"),
            ("trained", "", "visits trained on"),
            ("pass_rate", "", "mean accuracy of the visits"),
            ("variance", "", "mean over the visits of the variance within the group"),
            ("last_step", "", "of the last visit"),
            ("last_fate", "", "what became of it"),
        ),
        query="SELECT history.prompt, source, visits, trained, pass_rate, history.variance, last.step AS last_step, "
        "last.fate AS last_fate "
        "FROM (SELECT prompt, count(*) AS visits, sum(fate = 'trained') AS trained, avg(accuracy) AS pass_rate, "
        "avg(variance) AS variance, max(draw) AS last_draw FROM groups GROUP BY prompt) AS history "
        "JOIN groups AS last ON last.draw = last_draw "
        f"JOIN prompts ON prompts.prompt = history.prompt AND split = '{TRAIN}'",
    ),
    View(
        name="answers",
        text="A row per response with its group and its prompt.",
        columns=(
            ("step", "", "that used the group up"),
            ("prompt", "", "number"),
            ("source", "", "`data_source` of the row"),
            ("question", "", "text of the prompt"),
            ("ground_truth", "", "the right answer"),
            ("fate", "", "of the group"),
        ),
        query="SELECT groups.step, groups.prompt, source, prompts.text AS question, ground_truth, fate, responses.* "
        "FROM responses JOIN groups USING (draw) "
        f"JOIN prompts ON prompts.prompt = groups.prompt AND split = '{TRAIN}'",
    ),
)


def statements() -> Iterator[str]:
    for one in (*TABLES, *VIEWS):
        yield from one.statements()
    yield f"PRAGMA user_version = {VERSION}"
