"""Reads data files in chunks of a few thousand rows, with the columns of DAPO-Math-17k (`dapo.data.layouts`).
`dapo.data.prompts` checks the values."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dapo.config.facts.hub import unreachable
from dapo.config.paths import checked_data, data_parts, not_on_hub
from dapo.data.layouts import MEDIA, SCHEMA, VERL, VERL_COLUMNS, Layout, Reading, by_first_row, layout_of
from dapo.data.values import shown

COLUMNS = (*VERL_COLUMNS, "extra_info", *MEDIA)
PAGE_BUFFER = 2**20  # bytes
CHUNK_ROWS = 8192  # the public DAPO-Math file has 1.8 million rows
MEDIA_ROWS = 64  # for files with images, which may take megabytes each
SAVED = "state.json"  # written by `save_to_disk` of the `datasets` library


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of a file. `rest(i)` returns the other columns of row `first_row + i`. It is called only for
    rows with a new prompt: converting all rows doubles the time for a file that repeats each prompt 100 times."""

    first_row: int
    prompts: list[Any]
    reward_models: list[Any]
    rest: Callable[[int], dict[str, Any]]


def read_chunks(name: str, key: str, reading: Reading) -> Iterator[Chunk]:
    """Yields the rows of a local .parquet, .json or .jsonl file, or a folder or hub name for the `datasets` library, in
    order. name: from `dapo.config.paths.checked_data`. key: named in errors. Raises ValueError for unreadable or
    incomplete data."""
    path = Path(name)
    if not path.is_file():
        yield from _hub_chunks(name, key, reading)
    elif path.suffix == ".parquet":
        yield from _parquet_chunks(path, f"`{key}`: {name}", reading)
    elif path.suffix in (".json", ".jsonl"):
        yield from _json_chunks(path, f"`{key}`: {name}", reading)
    else:
        raise ValueError(f"`{key}`: {name} is neither .parquet nor .json nor .jsonl; convert it to one of them")


def _parquet_chunks(path: Path, where: str, reading: Reading) -> Iterator[Chunk]:
    # pyarrow directly, because `datasets` takes 1.4 s to import and copies the file into its cache.
    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=PAGE_BUFFER) as file:  # default: whole file
            layout, columns = _columns(file.schema_arrow, where, reading)
            batches = file.iter_batches(batch_size=_at_a_time(columns), columns=columns)
            yield from _arrow_chunks((pa.Table.from_batches([batch]) for batch in batches), layout, where, reading)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read as Parquet ({error}); write or copy it again") from error


def _hub_chunks(name: str, key: str, reading: Reading) -> Iterator[Chunk]:
    where = f"`{key}`: {name}"
    repository, config, split = data_parts(checked_data(name, key=key))
    if not Path(repository).is_dir() and (unknown := unreachable(repository, "dataset")):
        raise ValueError("; ".join(not_on_hub(key, repository, unknown, "file"))) from unknown
    check_cache(repository, where)
    import datasets  # imported here because it takes 1.4 s and only this path needs it

    try:
        if (Path(repository) / SAVED).is_file() and not split:
            found = datasets.load_from_disk(repository)
        else:
            found = datasets.load_dataset(repository, config or None, split=split or None)
    except Exception as error:  # depends on the network, the hub and the file type
        raise ValueError(
            f"{where} could not be loaded as a data set ({type(error).__name__}: {error}); check the name (OWNER/NAME, "
            "OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT), the network and the cache (HF_HOME), or give a file"
        ) from error
    if isinstance(found, datasets.DatasetDict):
        if len(found) > 1:
            splits = ", ".join(sorted(str(each) for each in found))
            raise ValueError(f"{where} has the splits {splits}; name one, as in {repository}:{min(map(str, found))}")
        found = next(iter(found.values()))
    layout, columns = _columns(found.features.arrow_schema, where, reading)
    tables = found.select_columns(columns).with_format("arrow").iter(_at_a_time(columns))
    yield from _arrow_chunks(tables, layout, where, reading)


def check_cache(repository: str, where: str) -> None:
    """Raises ValueError if the library `datasets` needs its cache for a folder or hub name and cannot write it."""
    if (Path(repository) / SAVED).is_file():
        return
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise ValueError(
            f"{where} is read through the cache of the library `datasets`, which cannot be written ({error}); set "
            "HF_HOME or HF_DATASETS_CACHE to a folder that can be, or give the single files"
        ) from None


def _arrow_chunks(tables: Iterator[pa.Table], layout: Layout | None, where: str, reading: Reading) -> Iterator[Chunk]:
    first_row = 0
    for table in tables:
        if layout is not None:
            rows = table.to_pylist()
            if rows and not first_row:
                layout = by_first_row(layout, rows[0], reading.format) or layout
            for number, row in enumerate(rows, first_row):
                yield _single(number, layout.converted(row, _row(where, number), reading.entry))
            first_row += len(table)
            continue
        others = table.drop_columns(["prompt", "reward_model"])

        def rest(i: int, others: pa.Table = others) -> dict[str, Any]:
            found: dict[str, Any] = others.slice(i, 1).to_pylist()[0]
            return found

        prompts, reward_models = (table[name].to_pylist() for name in ("prompt", "reward_model"))
        yield Chunk(first_row, prompts, reward_models, rest)
        first_row += len(table)


def _single(number: int, row: dict[str, Any]) -> Chunk:
    return Chunk(number, [row["prompt"]], [row["reward_model"]], lambda _: row)


def _json_chunks(path: Path, where: str, reading: Reading) -> Iterator[Chunk]:
    """Yields one chunk per row, because each row of a JSON file has its own columns. The first row decides the
    layout."""
    format = reading.format
    for number, row in _json_rows(path, where):
        at = _row(where, number)
        if not isinstance(row, dict):
            raise ValueError(f"{at}: must be an object with columns {SCHEMA}, not {shown(row)}")
        layout = layout_of(list(row), format, at, text_prompt=isinstance(row.get("prompt"), str))
        layout = by_first_row(layout, row, format)
        format = VERL if layout is None else layout.name
        yield _single(number, row if layout is None else layout.converted(row, at, reading.entry))


def _json_rows(path: Path, where: str) -> Iterator[tuple[int, Any]]:
    """Yields (row number, value) of a JSON array, or (line number, value) of a file with one value per line."""
    at = where
    try:
        with path.open(encoding="utf-8-sig") as file:
            is_array = file.read(64).lstrip().startswith("[")
            file.seek(0)
            if is_array:
                yield from enumerate(json.load(file))
                return
            for number, line in enumerate(file):
                at = _row(where, number)
                if line.strip():
                    yield number, json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{at}: not valid JSON ({error}); write one object per line, or one array") from error
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{where} cannot be read as UTF-8 text ({error}); write or copy it again") from error
    except (RecursionError, ValueError) as error:  # nested too deeply; a number with thousands of digits
        raise ValueError(f"{at} cannot be read ({error}); correct or remove the row") from error


def _columns(schema: pa.Schema, where: str, reading: Reading) -> tuple[Layout | None, list[str]]:
    """Returns the layout and the columns to read: all, unless it is verl's, because the rest goes into `extra_info`."""
    found = list(schema.names)
    text = "prompt" in found and schema.field("prompt").type in (pa.string(), pa.large_string())
    layout = layout_of(found, reading.format, where, text_prompt=text)
    return layout, found if layout else [column for column in COLUMNS if column in found]


def _at_a_time(columns: list[str]) -> int:
    return MEDIA_ROWS if any(name in columns for name in MEDIA) else CHUNK_ROWS


def _row(where: str, number: int) -> str:
    return f"{where}, row {number} (counted from 0)"
