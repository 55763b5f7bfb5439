"""Turns rows of data files (`dapo.data.files`) into distinct, tokenized `Prompt`s and a `DataReport`."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from dapo.answers.answer import agree, read_truth
from dapo.config.paths import checked_data
from dapo.data.files import Chunk, read_chunks
from dapo.data.layouts import AS_IT_IS, SCHEMA, Reading, refuse_media
from dapo.data.template import DATE_FUNCTION, asked, check_template, clock_at, template_text
from dapo.data.tokenizer import token_ids
from dapo.data.values import refuse_halves, shown
from dapo.types import Int32Array, Messages, Prompt

MEASURED = 500  # prompts tokenized before a run
CHECKED_ROWS = 100_000  # of a file, before a run: about a second
MESSAGE_KEYS = frozenset(["role", "content", "name"])  # `name` is accepted but ignored


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """Counts of rows: rows = duplicates + contradictory + too_long + kept; the last three count distinct prompts.
    contradictory: prompts with ground truths that disagree. Made by `load_counted`. Reports can be added."""

    rows: int
    duplicates: int
    contradictory: int
    too_long: int
    kept: int

    def __add__(self, other: "DataReport") -> "DataReport":
        return DataReport(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


@dataclass(slots=True)
class _Problem:
    """A distinct prompt, with the values of its first row. copies: number of rows that have it. contradiction: row and
    text of a different ground truth, if any."""

    where: str
    messages: Messages
    ground_truth: str
    source: str
    extra_info: dict[str, Any]
    copies: int = 1
    contradiction: str = ""


def load_counted(
    files: Sequence[str],
    tokenizer: Any,
    *,
    max_prompt_length: int,
    max_contradictory: float,
    max_too_long: float,
    key: str,
    reading: Reading = AS_IT_IS,
    today: datetime | None = None,
) -> tuple[list[tuple[Prompt, int]], DataReport]:
    """Returns the distinct prompts of `files` in file order, rendered with the chat template, each with its number of
    rows.

    files: local .parquet/.json/.jsonl, `pkg://PACKAGE/FILE`, a folder or a hub data set, both also with a split,
    `OWNER/NAME:SPLIT` or `OWNER/NAME:CONFIG:SPLIT`. max_prompt_length: in tokens; longer prompts are dropped.
    max_contradictory, max_too_long: maximum shares of distinct prompts that may be dropped because their ground truths
    disagree, and because they are longer. key: named in errors. today: the date for templates that write one; None: the
    real date. Raises ValueError for bad files and rows (naming file, row and column), and if no prompt is left.
    """
    check_template(tokenizer, reading.template_kwargs)
    rows, distinct = _distinct(files, key, reading)
    problems = _without_contradictions(distinct, max_contradictory, key)
    texts = [_chat_text(tokenizer, problem, reading, today) for problem in problems]
    ids = token_ids(tokenizer, texts)
    fitting = [i for i, tokens in enumerate(ids) if len(tokens) <= max_prompt_length]
    report = DataReport(
        rows=rows,
        duplicates=rows - len(distinct),
        contradictory=len(distinct) - len(problems),
        too_long=len(problems) - len(fitting),
        kept=len(fitting),
    )
    if not fitting:
        shortest = min(map(len, ids), default=0)
        raise ValueError(
            f"`{key}`: no prompt is left of {rows} rows: {report.contradictory} have ground truths that contradict "
            f"each other, {report.too_long} are longer than `data.max_prompt_length` ({max_prompt_length}), the "
            f"shortest of {shortest} tokens; raise it or give other files"
        )
    if report.too_long > max_too_long * len(problems):
        enough = sorted(map(len, ids))[math.ceil((1 - max_too_long) * len(ids)) - 1]
        raise ValueError(
            f"`{key}`: {report.too_long} of {len(problems)} prompts are longer than `data.max_prompt_length` "
            f"({max_prompt_length}), above the share `data.max_too_long` ({max_too_long}); raise the length ({enough} "
            "tokens are enough), or the share to leave them out"
        )
    prompts = [_prompt(number, problems[i], texts[i], ids[i], reading.entry) for number, i in enumerate(fitting)]
    return [(prompt, problems[i].copies) for prompt, i in zip(prompts, fitting, strict=True)], report


def check_rows(files: Sequence[str], *, max_contradictory: float, key: str, reading: Reading) -> list[str]:
    """Raises ValueError as `load_counted` does, for what shows without a tokenizer in the first `CHECKED_ROWS` rows of
    each file. Arguments as there. Returns the texts of the distinct prompts."""
    rows, distinct = _distinct(files, key, reading, CHECKED_ROWS)
    if rows < CHECKED_ROWS:  # all of them: the share is not that of a part
        _without_contradictions(distinct, max_contradictory, key)
    return ["".join([content.strip() for _, content in problem.messages]) for problem in distinct]


def check_lengths(
    texts: Sequence[str], tokenizer: Path, max_prompt_length: int, max_too_long: float, *, key: str
) -> None:
    """Raises ValueError if, of up to `MEASURED` texts, twice the share `max_too_long` are too long even without a chat
    template. tokenizer: a tokenizer.json, read without transformers, which would load torch."""
    from tokenizers import Tokenizer

    tried = texts[:: -(-len(texts) // MEASURED)]
    encoded = Tokenizer.from_file(str(tokenizer)).encode_batch_fast(tried, add_special_tokens=False)
    too_long = sum(len(one.ids) > max_prompt_length for one in encoded)
    if too_long > 2 * max_too_long * len(tried):
        raise ValueError(
            f"`{key}`: of {len(tried)} prompts {too_long} are longer than `data.max_prompt_length` "
            f"({max_prompt_length}), above the share `data.max_too_long` ({max_too_long}); raise the length (the "
            f"longest has {max(len(one.ids) for one in encoded)} tokens without its chat template), or the share to "
            "leave them out"
        )


def _distinct(files: Sequence[str], key: str, reading: Reading, most: float = math.inf) -> tuple[int, list[_Problem]]:
    if not files:
        raise ValueError(f"`{key}` is empty; give at least one file or hub data set")
    rows = 0
    seen: dict[Messages, _Problem] = {}
    for name in files:
        name = checked_data(name, key=key)
        in_file = 0
        for chunk in read_chunks(name, key, reading):
            _add_distinct(chunk, f"`{key}`: {name}", seen, reading.system_prompt)
            in_file += len(chunk.prompts)
            if in_file >= most:
                break
        if in_file == 0:
            raise ValueError(f"`{key}`: {name} has no rows; give a file with columns {SCHEMA}")
        rows += in_file
    return rows, list(seen.values())


def _without_contradictions(distinct: list[_Problem], allowed: float, key: str) -> list[_Problem]:
    bad = [problem for problem in distinct if problem.contradiction]
    if len(bad) > allowed * len(distinct):
        raise ValueError(
            f"`{key}`: {len(bad)} of {len(distinct)} distinct prompts have ground truths that contradict each other, "
            f"above the share `data.max_contradictory` ({allowed}); correct the files, or raise it to leave such "
            f"prompts out; for example {bad[0].where} says {bad[0].ground_truth!r}, {bad[0].contradiction}"
        )
    return [problem for problem in distinct if not problem.contradiction]


def fingerprint(prompts: Sequence[Prompt], tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> str:
    """Returns 16 hex digits that change with any prompt, its ground truth, the order of prompts, the chat template, the
    tokens of the template's text or its arguments (`data.chat_template_kwargs`), but not with the date that a template
    writes."""
    template = template_text(tokenizer)
    ids = tokenizer(template, add_special_tokens=False, verbose=False)["input_ids"]
    given = [dict(template_kwargs)] if template_kwargs else []
    digest = hashlib.sha256(json.dumps([template, ids, *given], sort_keys=True).encode())
    for prompt in prompts:
        entry = [prompt.entry] if prompt.entry else []
        digest.update(json.dumps([prompt.source, prompt.messages, prompt.ground_truth, *entry]).encode())
    return digest.hexdigest()[:16]


def _prompt(number: int, problem: _Problem, text: str, ids: Int32Array, entry: str) -> Prompt:
    return Prompt(
        id=number,
        source=problem.source,
        messages=problem.messages,
        text=text,
        token_ids=ids,
        ground_truth=problem.ground_truth,
        extra_info=problem.extra_info,
        entry=entry,
    )


def _chat_text(tokenizer: Any, problem: _Problem, reading: Reading, today: datetime | None) -> str:
    clock = clock_at(today) if today and DATE_FUNCTION in template_text(tokenizer) else nullcontext()
    try:
        with clock:
            return asked(tokenizer, problem.messages, reading.template_kwargs)
    except ValueError as error:
        raise ValueError(f"{problem.where}: {error}") from error


def _add_distinct(chunk: Chunk, where: str, seen: dict[Messages, _Problem], system_prompt: str) -> None:
    for i, (messages_value, reward_model) in enumerate(zip(chunk.prompts, chunk.reward_models, strict=True)):
        row = f"{where}, row {chunk.first_row + i} (counted from 0)"
        messages = _with_system_prompt(_messages(messages_value, row), system_prompt)
        truth = _ground_truth(reward_model, row)
        first = seen.get(messages)
        if first is None:
            refuse_halves("".join([content for _, content in messages]), f"{row}: column `prompt`")
            refuse_halves(truth, f"{row}: column `reward_model.ground_truth`")
            seen[messages] = _Problem(row, messages, truth, *_source_and_extra(chunk.rest(i), row))
            continue
        first.copies += 1
        if truth != first.ground_truth and not first.contradiction and not _same(truth, first.ground_truth):
            first.contradiction = f"{row} says {truth!r}"


def _same(one: str, other: str) -> bool:
    """Whether two ground truths differ only in spelling (34 and 34.0), as the reward functions read them."""
    return agree(read_truth(one), read_truth(other))


def _messages(value: Any, row: str) -> Messages:
    _refuse_other_keys(value, row)
    try:
        messages = tuple([(message["role"], message["content"]) for message in value])
    except (TypeError, KeyError, IndexError):
        messages = ()
    for role, content in messages:
        if type(role) is not str or type(content) is not str:
            messages = ()
    if messages and messages[-1][1].strip():
        if messages[-1][0] == "assistant":
            raise ValueError(
                f"{row}: column `prompt` ends with what an assistant says ({shown(messages[-1][1])}), and the model "
                "would answer after that; remove that message, a solution belongs into a column of its own"
            )
        return messages
    if messages or (isinstance(value, list) and not value):
        raise ValueError(f"{row}: column `prompt` is empty; remove the row or fill it")
    raise ValueError(
        f'{row}: column `prompt` must be a list of {{"role": text, "content": text}}, not {shown(value)}; '
        'a plain question is [{"role": "user", "content": QUESTION}]'
    )


def _refuse_other_keys(value: Any, row: str) -> None:
    """Raises ValueError if a message has more than role, content and name, such as tool calls. Empty keys, which
    Parquet adds to all messages of a file, are allowed."""
    for message in value if isinstance(value, list) else ():
        for key in message if isinstance(message, dict) else ():
            if key not in MESSAGE_KEYS and message[key]:
                raise ValueError(
                    f"{row}: column `prompt` has a message with `{key}` ({shown(message[key])}), which would be left "
                    "out, for a prompt is made of role and content; write it into the content, or remove it"
                )


def _with_system_prompt(messages: Messages, system_prompt: str) -> Messages:
    if not system_prompt:
        return messages
    return (("system", system_prompt), *(messages[1:] if messages[0][0] == "system" else messages))


def _ground_truth(value: Any, row: str) -> str:
    if not isinstance(value, dict):
        raise ValueError(
            f'{row}: column `reward_model` must be a struct {{"ground_truth": text, "style": text}}, '
            f"not {shown(value)}; store it as a struct, not as JSON text"
        )
    truth = value.get("ground_truth")
    if isinstance(truth, str) and truth.strip():
        return truth
    if truth is None or isinstance(truth, str):
        raise ValueError(f"{row}: column `reward_model.ground_truth` is empty; remove the row or fill it")
    raise ValueError(f"{row}: column `reward_model.ground_truth` must be text, not {shown(truth)}; store it as text")


def _source_and_extra(rest: dict[str, Any], row: str) -> tuple[str, dict[str, Any]]:
    refuse_media(rest, row)
    source, extra = rest["data_source"], rest.get("extra_info")
    if not isinstance(source, str) or not source:
        raise ValueError(f"{row}: column `data_source` must be text, not {shown(source)}; reward functions see it")
    if extra is not None and not isinstance(extra, dict):
        raise ValueError(f"{row}: column `extra_info` must be a struct, not {shown(extra)}; remove or correct it")
    return source, extra or {}
