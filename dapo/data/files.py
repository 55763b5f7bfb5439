"""Reads rows of data files in the DAPO-Math schema, a few thousand at a time, whatever their format.

In: a local .parquet, .json or .jsonl file, or a folder or hub name for the `datasets` library. Out: `Chunk`s whose
columns exist; what stands in them is checked by `dapo.data.prompts`. What cannot be read is an error naming the file.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")
COLUMNS = (*REQUIRED_COLUMNS, "extra_info")
PAGE_BUFFER = 2**20  # bytes of one column of a Parquet file that are read at a time
CHUNK_ROWS = 8192  # rows in memory at a time: the public DAPO-Math file has 1.8 million
SCHEMA = 'data_source, prompt [{"role", "content"}], reward_model {"ground_truth", "style"}, extra_info (optional)'


@dataclass(frozen=True, slots=True)
class Chunk:
    """Holds some consecutive rows of a file. `rest(i)` gives the other columns of row `first_row + i`, asked only of
    rows that turn out to be new: converting them all doubles the time for a file that repeats each prompt 100 times."""

    first_row: int
    prompts: list[Any]
    reward_models: list[Any]
    rest: Callable[[int], dict[str, Any]]


def read_chunks(name: str, key: str) -> Iterator[Chunk]:
    """Yields the rows of one file, folder or hub data set in order. name: as `dapo.config.paths.checked_path` gives it.

    key: the configuration key to name in errors. Raises ValueError for what cannot be read or lacks a column.
    """
    path = Path(name)
    if not path.is_file():
        yield from _hub_chunks(name, key)
    elif path.suffix == ".parquet":
        yield from _parquet_chunks(path, f"`{key}`: {name}")
    elif path.suffix in (".json", ".jsonl"):
        yield from _json_chunks(path, f"`{key}`: {name}")
    else:
        raise ValueError(f"`{key}`: {name} is neither .parquet nor .json nor .jsonl; convert it to one of them")


def _parquet_chunks(path: Path, where: str) -> Iterator[Chunk]:
    # pyarrow itself, because `datasets` takes 1.4 s to import and writes a copy of the file into its cache.
    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=PAGE_BUFFER) as file:  # by default it holds all of it
            columns = _checked_columns(file.schema_arrow.names, where)
            batches = file.iter_batches(batch_size=CHUNK_ROWS, columns=columns)
            yield from _arrow_chunks(pa.Table.from_batches([batch]) for batch in batches)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{where} cannot be read as Parquet ({error}); write or copy it again") from error


def _hub_chunks(name: str, key: str) -> Iterator[Chunk]:
    import datasets  # here, because only this path needs it and it takes 1.4 s

    where = f"`{key}`: {name}"
    repository, _, split = name.partition(":")
    try:
        found = datasets.load_dataset(repository, split=split or None)
    except Exception as error:  # a network, the hub and every kind of data file are behind this call
        raise ValueError(
            f"{where} is no local file and could not be loaded as a data set ({type(error).__name__}: {error}); "
            "check the name (OWNER/NAME or OWNER/NAME:SPLIT), the network, or give a local file"
        ) from error
    if isinstance(found, datasets.DatasetDict):
        if len(found) > 1:
            splits = ", ".join(sorted(str(each) for each in found))
            raise ValueError(f"{where} has the splits {splits}; name one, as in {repository}:{min(map(str, found))}")
        found = next(iter(found.values()))
    columns = _checked_columns(found.column_names, where)
    yield from _arrow_chunks(found.select_columns(columns).with_format("arrow").iter(CHUNK_ROWS))


def _arrow_chunks(tables: Iterator[pa.Table]) -> Iterator[Chunk]:
    first_row = 0
    for table in tables:
        others = table.drop_columns(["prompt", "reward_model"])

        def rest(i: int, others: pa.Table = others) -> dict[str, Any]:
            return others.slice(i, 1).to_pylist()[0]

        yield Chunk(first_row, table["prompt"].to_pylist(), table["reward_model"].to_pylist(), rest)
        first_row += len(table)


def _json_chunks(path: Path, where: str) -> Iterator[Chunk]:
    """Yields one chunk per row, because each row of a JSON file has columns of its own."""

    def chunk(number: int, row: dict[str, Any]) -> Chunk:
        return Chunk(number, [row["prompt"]], [row["reward_model"]], lambda _: row)

    for number, row in _json_rows(path, where):
        at = f"{where}, row {number} (counted from 0)"
        if not isinstance(row, dict):
            raise ValueError(f"{at}: must be an object with columns {SCHEMA}, not {shown(row)}")
        _checked_columns(list(row), at)
        yield chunk(number, row)


def _json_rows(path: Path, where: str) -> Iterator[tuple[int, Any]]:
    """Yields (row number, value) of a JSON array, or of one value per line, where a row's number is its line's."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            is_array = file.read(64).lstrip().startswith("[")
            file.seek(0)
            if is_array:
                yield from enumerate(json.load(file))
                return
            for number, line in enumerate(file):
                if line.strip():
                    yield number, json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}, row {number} (counted from 0): not valid JSON ({error}); write one object per line, or one array"
        ) from error
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{where} cannot be read as UTF-8 text ({error}); write or copy it again") from error


def _checked_columns(found: list[str], where: str) -> list[str]:
    missing = [column for column in REQUIRED_COLUMNS if column not in found]
    if missing:
        raise ValueError(
            f"{where}: column {', '.join(f'`{name}`' for name in missing)} is missing (found: {', '.join(found)}); "
            f"the schema is {SCHEMA}"
        )
    return [column for column in COLUMNS if column in found]


def shown(value: Any) -> str:
    """Returns type and beginning of a value from a file, for an error."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
