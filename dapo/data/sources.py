"""Lists and loads the data files of a run: `data.train_files` or `data.sources`, and the held-out sets of
`data.val_files` (a list is one set, a mapping has several by name) and of the entries' `val_files`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dapo.config.sampling import MAX_SAMPLES, DataConfig, SourceConfig
from dapo.config.schema import Config
from dapo.data.layouts import Reading
from dapo.data.prompts import DataReport, check_lengths, check_rows, load_counted
from dapo.types import HeldOut, Prompt

TRAIN, HELD_OUT = "data.train_files", "data.val_files"

Told = Callable[[str, DataReport], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Files that are read the same way. key: configuration key. name: of a held-out set."""

    key: str
    name: str = ""
    files: list[str]
    reading: Reading


def train_files(data: DataConfig) -> Iterator[Files]:
    if data.train_files:
        yield Files(key=TRAIN, files=data.train_files, reading=_plain(data))
    for index, source in enumerate(data.sources):
        yield Files(key=f"data.sources[{index}].files", files=source.files, reading=_reading(source, data))


def held_out_files(data: DataConfig) -> Iterator[Files]:
    """Yields the files of each held-out set, those of `data.val_files` first. A plain list is one set without a
    name."""
    given = data.val_files or []
    for name, files in given.items() if isinstance(given, dict) else [("", given)] if given else []:
        key = f"{HELD_OUT}.{name}" if name else HELD_OUT
        files = [files] if isinstance(files, str) else list(files)
        yield Files(key=key, name=name, files=files, reading=_plain(data))
    for index, source in enumerate(data.sources):
        if source.val_files:
            key = f"data.sources[{index}].val_files"
            yield Files(key=key, name=source.name, files=source.val_files, reading=_reading(source, data))


def _plain(data: DataConfig) -> Reading:
    return Reading(format=data.format, system_prompt=data.system_prompt, template_kwargs=data.chat_template_kwargs)


def _reading(source: SourceConfig, data: DataConfig) -> Reading:
    return Reading(
        format=source.format,
        system_prompt=source.system_prompt or data.system_prompt,
        entry=source.name,
        template_kwargs=data.chat_template_kwargs,
    )


def load_train(
    cfg: Config, tokenizer: Any, *, today: datetime | None = None, told: Told = lambda key, report: None
) -> tuple[list[Prompt], DataReport]:
    """Returns the training prompts (the position of each is its id; those of one source are consecutive) and the total
    report. told: called with the key and the report of each source. Raises ValueError, as
    `dapo.data.prompts.load_counted` does."""
    prompts: list[Prompt] = []
    whole = DataReport(rows=0, duplicates=0, contradictory=0, too_long=0, kept=0)
    for one in train_files(cfg.data):
        counted, report = _load(one, cfg.data, tokenizer, today)
        told(one.key, report)
        first = len(prompts)
        prompts += [replace(prompt, id=first + prompt.id) if first else prompt for prompt, _ in counted]
        whole = whole + report
    return prompts, whole


def load_held_out(
    cfg: Config, tokenizer: Any, *, today: datetime | None = None, told: Told = lambda key, report: None
) -> list[HeldOut]:
    """Returns the held-out sets in the order of the configuration; arguments as for `load_train`. Rows that repeat a
    problem are its samples, as in the published AIME-2024 file (30 problems, 32 rows each): a problem gets
    max(`eval.n`, number of rows) answers."""
    loaded = []
    for one in held_out_files(cfg.data):
        counted, report = _load(one, cfg.data, tokenizer, today)
        told(one.key, report)
        samples = tuple(max(cfg.eval.n, copies) for _, copies in counted)
        if max(samples) > MAX_SAMPLES:
            raise ValueError(
                f"`{one.key}` holds a problem {max(samples)} times, and each row is one of its samples, of which there "
                f"may be {MAX_SAMPLES}; remove copies"
            )
        loaded.append(HeldOut(name=one.name, prompts=tuple(prompt for prompt, _ in counted), samples=samples))
    return loaded


def check_files(one: Files, data: DataConfig, model: Path) -> None:
    """Raises ValueError for bad rows of local files, and for many prompts that are too long, as far as both show
    without transformers. model: its folder, or none."""
    texts = check_rows(one.files, max_contradictory=data.max_contradictory, key=one.key, reading=one.reading)
    if (tokenizer := model / "tokenizer.json").is_file():
        limits = data.max_prompt_length, data.max_too_long
        check_lengths(texts, tokenizer, *limits, key=one.key)


def _load(
    one: Files, data: DataConfig, tokenizer: Any, today: datetime | None
) -> tuple[list[tuple[Prompt, int]], DataReport]:
    return load_counted(
        one.files,
        tokenizer,
        max_prompt_length=data.max_prompt_length,
        max_contradictory=data.max_contradictory,
        max_too_long=data.max_too_long,
        key=one.key,
        reading=one.reading,
        today=today,
    )
