"""The schema as it is written down is the schema as it is."""

import hashlib
from contextlib import closing
from pathlib import Path

import pytest

from dapo.report.store.__main__ import reference
from dapo.report.store.schema import TABLES, VERSION, VIEWS, statements
from dapo.report.store.writer import opened

ROOT = Path(__file__).resolve().parents[3]


def test_the_reference_is_current():
    assert (ROOT / "dapo/report/store/README.md").read_text() == reference(), (
        "python -m dapo.report.store > dapo/report/store/README.md"
    )


def test_a_database_has_what_the_reference_says(tmp_path):
    with closing(opened(tmp_path / "samples.sqlite", pytest.fail)) as connection:
        for table in TABLES:
            found = [row[1] for row in connection.execute(f"PRAGMA table_info({table.name})")]
            assert found == [name for name, _, _ in table.columns]
        for view in VIEWS:
            found = {row[1] for row in connection.execute(f"PRAGMA table_info({view.name})")}
            named = {name for name, _, _ in view.columns}
            assert named <= found and (not found - named or view.name == "answers")
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite%'")}
        indexes = {f"{table.name}_by_{column}" for table in TABLES for column in table.indexes}
        indexes |= {f"{table.name}_with_text" for table in TABLES if table.oldest}
        assert names == {one.name for one in (*TABLES, *VIEWS)} | indexes
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# Of the statements: whoever changes one counts VERSION on, for a run may find the database of an older dapo.
DIGESTS = {
    1: "30a07b80e4d13cdc",
    2: "4e54ac536750e5e9",
    3: "2b2cc59e5ad06903",
    4: "16e72da70a483a3b",
    5: "f4c354c1645c88a6",
    6: "f65885027292c069",
}


def test_another_schema_has_another_version():
    digest = hashlib.sha256("\n".join(statements()).encode()).hexdigest()[:16]
    assert DIGESTS[VERSION] == digest
