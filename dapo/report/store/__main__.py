"""Prints the reference of the sample store as Markdown: `python -m dapo.report.store > dapo/report/store/README.md`.

In: the tables and views of `schema.py`. Out: what the store is, how to open it, and every column.
"""

from dapo.ground.table import table
from dapo.report.store.schema import ANSWER, DATABASE, TABLES, VERSION, VIEWS

HEADER = f"""\
# dapo.report.store: the sample store

Written by `python -m dapo.report.store > dapo/report/store/README.md` from `schema.py`; edit that.

`{DATABASE}` in a run's output directory is a SQLite database: every group of responses that a step used up, and why
it was trained on or dropped. `dapo inspect RUN` reads it; sqlite3, Datasette, pandas and duckdb open it too, also
while the run goes on.

```bash
sqlite3 outputs/dapo_tiny/{DATABASE} "SELECT fate, count(*) FROM groups WHERE step = 17 GROUP BY fate"
```

```python
pandas.read_sql("SELECT * FROM answers WHERE step = 17", sqlite3.connect("outputs/dapo_tiny/{DATABASE}"))
```

- A step is written in one transaction after its update: all of it or nothing.
- A run that continues from a checkpoint deletes later steps; `runs` and `events` keep everything. Groups that were
  generated and not used up are not here: see `returned`, `steps.lost_tokens` and the metrics `ledger/wasted_*`.
- Size: about 150 bytes per response besides its text. `logging.max_text_bytes` cuts the middle of a long text;
  `logging.sample_fraction` of the groups keep theirs; above `logging.max_store_bytes` the oldest texts are deleted.
- What cannot be written (a full disk, a lock held for a minute) is left out with a warning, and the run goes on. A
  damaged file, or one of another version, is renamed.
- On a network file system, and for a run that was killed in a folder that is read-only, copy the file together with
  `{DATABASE}-wal` and read the copy.

`PRAGMA user_version` is {VERSION}. Times are Unix seconds (`datetime(at, 'unixepoch')`); open JSON columns with
`json_each`. A policy version is the number of completed updates; a step has the number of the version that it made.
"""


def main() -> None:
    print(reference(), end="")


def reference() -> str:
    parts = [HEADER, "## Tables\n"]
    for one in TABLES:
        key = f" Key: `{one.key}`." if one.key else ""
        shared = "responses" if one.columns[-len(ANSWER) :] == ANSWER and one.name != "responses" else ""
        columns = [[f"`{name}`", text] for name, _, text in one.columns if not shared or (name, _, text) not in ANSWER]
        columns += [["others", f"`{ANSWER[0][0]}` to `{ANSWER[-1][0]}` as in `{shared}`"]] if shared else []
        parts.append(f"### `{one.name}`\n\n{one.text}{key}\n\n{table(('column', 'meaning'), columns)}\n")
    parts.append("## Views\n")
    for view in VIEWS:
        columns = [[f"`{name}`", text] for name, _, text in view.columns]
        parts.append(f"### `{view.name}`\n\n{view.text}\n\n{table(('column', 'meaning'), columns)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    main()
