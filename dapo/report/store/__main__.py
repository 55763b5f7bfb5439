"""Prints the reference of the sample store as Markdown: `python -m dapo.report.store > dapo/report/store/README.md`.

In: the tables and views of `schema.py`. Out: what the store is, how to open it, and every column.
"""

from dapo.ground.table import table
from dapo.report.store.schema import DATABASE, TABLES, VERSION, VIEWS

HEADER = f"""\
# dapo.report.store: the sample store

Written by `python -m dapo.report.store > dapo/report/store/README.md` from `schema.py`; edit that.

A run keeps what it sampled in `{DATABASE}` in its output directory: one SQLite database per run, every group that a
step used up with all responses, and why it was trained on or dropped. `python -m dapo.inspect RUN` reads it for you;
sqlite3, Datasette, pandas and duckdb open it as it is, also while the run goes on:

```bash
sqlite3 outputs/dapo_tiny/{DATABASE} "SELECT fate, count(*) FROM groups WHERE step = 17 GROUP BY fate"
```

```python
pandas.read_sql("SELECT * FROM answers WHERE step = 17", sqlite3.connect("outputs/dapo_tiny/{DATABASE}"))
```

- **When.** A step's rows are handed over when its update has ended, and written by a thread in one transaction: a
  step is there as a whole or not at all, also after kill -9. A checkpoint waits up to 10 s for the steps before it.
- **Once.** A run that goes on from a checkpoint forgets the steps after it first, as `metrics.jsonl` does; `runs` and
  `events` keep everything. Groups that were sampled and not used up (surplus, too old, refused, cut off) are not
  here: their draws start again; what they cost stands in `returned`, `steps.lost_tokens` and the metrics
  `ledger/wasted_*`.
- **Size.** About 150 bytes per response besides its text. A text longer than `logging.max_text_bytes` loses its
  middle, and `logging.sample_fraction` of the groups keep theirs, spread evenly over the draws. Above
  `logging.max_store_bytes`
  the texts of the oldest groups and answers go, and new rows take their pages: the file is at most a step larger than
  that, unless the figures alone, which all stay, are more; it does not become smaller. The log `{DATABASE}-wal` is as
  large as a step while that is written.
- **Failure.** What cannot be written (a full disk, more than 1 GiB that waits for a slow one, a lock that another
  program holds for a minute) is left out: a warning says so, and another one at the end counts it; the run goes on.
  A damaged file, and one of another version, is renamed and a new one begins; one that lacks nothing but newer tables
  or indexes gets them. On a file system of several hosts the write-ahead log needs readers on the driver's host: copy
  the file to read it elsewhere. In a folder that cannot be written to, `dapo.inspect` and `dapo.compare` read what a
  run leaves that has ended; of one that was killed, copy the file with its `-wal`.
- **Hostile texts** are data: bound as parameters, characters that UTF-8 cannot hold replaced, NUL shown as U+2400.

`PRAGMA user_version` is {VERSION}. Times are Unix seconds (`datetime(at, 'unixepoch')`), columns that hold JSON open
with `json_each`. A policy version is a number of completed updates; a step has the number of the version that it made.
"""


def main() -> None:
    print(reference(), end="")


def reference() -> str:
    parts = [HEADER, "## Tables\n"]
    for one in TABLES:
        key = f" Key: `{one.key}`." if one.key else ""
        columns = [[f"`{name}`", kind, text] for name, kind, text in one.columns]
        parts.append(f"### `{one.name}`\n\n{one.text}{key}\n\n{table(('column', 'type', 'meaning'), columns)}\n")
    parts.append("## Views\n")
    for view in VIEWS:
        columns = [[f"`{name}`", text] for name, _, text in view.columns]
        parts.append(f"### `{view.name}`\n\n{view.text}\n\n{table(('column', 'meaning'), columns)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    main()
