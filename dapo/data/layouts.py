"""Converts rows of known data set layouts (TRL, GSM8K, MATH) to verl's columns. With `data.format=auto` the layout
follows from the column names if only one fits. `dapo.data.files` reads rows that already have verl's columns
(DAPO-Math-17k) unchanged."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo.answers.spelling import boxed
from dapo.data.values import plain_text, shown

VERL = "verl"
VERL_COLUMNS = ("data_source", "prompt", "reward_model")
SCHEMA = 'data_source, prompt [{"role", "content"}], reward_model {"ground_truth", "style"}, extra_info (optional)'
TRUTHS = ("answer", "ground_truth", "solution")  # the first is the final answer alone
MARK = "####"  # before GSM8K's final answers
AUTO = "auto"
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # not supported in prompts
_KEYS = [re.compile(rf"['\"](?:{names})['\"]\s*:") for names in ("role|from", "content|value")]  # message keys
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How rows become prompts. Made from `data` or from an entry of `data.sources`. format: as `data.format`.
    system_prompt: replaces the rows' own system message; "" keeps it. entry: name of the entry; "" without entries.
    template_kwargs: `data.chat_template_kwargs`."""

    format: str = AUTO
    system_prompt: str = ""
    entry: str = ""
    template_kwargs: dict[str, Any] = field(default_factory=dict)


AS_IT_IS = Reading()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A data set layout. question: the column of the problem. truths: columns of the ground truth, at least one
    required. truth: reads the ground truth from a row; returns None if it is missing and raises ValueError if it is
    invalid. wants, instead: for the error if it is missing, what was expected and which `format` to use. after: the
    layout with the same columns that takes precedence."""

    name: str
    question: str
    truths: tuple[str, ...]
    truth: Callable[[Row], str | None]
    wants: str
    instead: str = "another `format`"
    after: str = ""

    def fits(self, columns: Sequence[str]) -> bool:
        return self.question in columns and any(name in columns for name in self.truths)

    def _messages(self, text: str, where: str) -> Any:
        """Parses a text that is the JSON of messages; any other text is one user message. Raises ValueError."""
        if not text.lstrip().startswith(("[", "{")) or not all(key.search(text) for key in _KEYS):
            return [{"role": "user", "content": text}]
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}: column `{self.question}` looks like messages and is no JSON ({error}): {shown(text)}; "
                "store a list of role and content, or the question alone"
            ) from None
        return found if isinstance(found, list) else [found]

    def __str__(self) -> str:
        return f"{self.name} ({self.question}; {' or '.join(self.truths)})"

    def converted(self, row: Row, where: str, source: str) -> Row:
        """Returns a row in verl's columns; unused columns go into `extra_info`. where: the row, for errors. source: the
        `data_source` of a row without one. Raises ValueError."""
        refuse_media(row, where)
        try:
            truth = self.truth(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}; correct or remove the row") from None
        if truth is None or not truth.strip():
            there = ", ".join(f"`{name}`" for name in self.truths if _says(row, name))
            raise ValueError(
                f"{where}: {f'column {there}' if there else 'it'} lacks {self.wants}, which `format` "
                f"{self.name} reads as the ground truth; correct or remove the row, or give {self.instead}"
            )
        prompt = row[self.question] if self.question in row else None
        if isinstance(prompt, str):
            prompt = self._messages(prompt, where)
        if not isinstance(prompt, list):
            raise ValueError(f"{where}: column `{self.question}` must be text or messages; correct or remove the row")
        read = {self.question, "data_source", *self.truths}
        own = row.get("extra_info") if isinstance(row.get("reward_model"), dict) else None
        if isinstance(own, dict):  # verl's columns, but the prompt is text
            read |= {"reward_model", "extra_info"}
        extra = {name: value for name, value in row.items() if name not in read}
        return {
            "data_source": row.get("data_source") or source or self.name,
            "prompt": prompt,
            "reward_model": {"ground_truth": truth.strip()},
            "extra_info": extra | own if isinstance(own, dict) else extra,
        }


def refuse_media(row: Row, where: str) -> None:
    """Raises ValueError if a row has images, video or audio. Empty columns are allowed."""
    for name in MEDIA:
        if row.get(name):
            raise ValueError(
                f"{where}: column `{name}` ({shown(row[name])}) would be left out, for the model sees text alone; "
                "remove the column where the problem is whole without it, else the row"
            )


def _says(row: Row, column: str) -> bool:
    value = row.get(column)
    return value is not None and not (isinstance(value, str) and not value.strip())


def _text(row: Row, column: str) -> str:
    text = plain_text(row[column])
    if text is None:
        raise ValueError(
            f"column `{column}` must be the answer as text, a finite number, or a list of one of these, not "
            f"{shown(row[column])}"
        )
    return text


def _plain(row: Row) -> str | None:
    """Returns the first ground truth found: `reward_model` in verl's columns first, then `TRUTHS`. Of a worked
    solution, returns the last box or else the text after the mark, if there is one."""
    model = row.get("reward_model")
    if isinstance(model, dict) and _says(model, "ground_truth"):
        return _text(model, "ground_truth")
    column = next((name for name in TRUTHS if _says(row, name)), None)
    if column is None:
        return None
    text = _text(row, column)
    if found := boxed(text):
        return found[-1]
    last = _behind_mark(text)
    return last if last and "\n" not in last else text  # a Markdown heading is not an answer mark


def _marked(row: Row) -> str | None:
    return _behind_mark(_text(row, "answer")) if _says(row, "answer") else None


def _behind_mark(text: str) -> str | None:
    _, mark, last = text.rpartition(MARK)
    return _THOUSANDS.sub("", last.strip()) if mark else None


def _of_solution(row: Row) -> str | None:
    if _says(row, "answer"):
        return _text(row, "answer")
    found = boxed(_text(row, "solution")) if _says(row, "solution") else []
    return found[-1] if found else None


LAYOUTS = (
    Layout(name="trl", question="prompt", truths=TRUTHS, truth=_plain, wants="an answer"),
    Layout(
        name="gsm8k",
        question="question",
        truths=("answer",),
        truth=_marked,
        wants=f"a final answer after {MARK}",
        instead="`format` qa, which reads answers alone",
    ),
    Layout(name="qa", question="question", truths=TRUTHS, truth=_plain, wants="an answer", after="gsm8k"),
    Layout(name="math", question="problem", truths=("answer", "solution"), truth=_of_solution, wants="a \\boxed{...}"),
)


def layout_of(columns: Sequence[str], format: str, where: str, *, text_prompt: bool = False) -> Layout | None:
    """Returns the layout of a file with these columns; None for verl's. where: the file or row, for errors.
    text_prompt: whether column `prompt` contains text instead of messages. Raises ValueError if the columns fit no
    layout, several, or not the layout named by `format`."""
    missing = [name for name in VERL_COLUMNS if name not in columns]
    if not missing and format in (AUTO, VERL):
        return LAYOUTS[0] if format == AUTO and text_prompt and LAYOUTS[0].fits(columns) else None
    fitting = [each for each in LAYOUTS if each.fits(columns) and format in (AUTO, each.name)]
    fitting = [each for each in fitting if each.after not in [other.name for other in fitting]]
    if len(fitting) == 1:
        return fitting[0]
    found = f"(found: {', '.join(columns)})"
    if fitting:
        names = " and ".join(str(each) for each in fitting)
        raise ValueError(f"{where}: the columns {found} fit {names}; name one of them as `format`")
    if named := next((each for each in LAYOUTS if each.name == format), None):
        raise ValueError(f"{where}: the columns {found} are not those of `format` {named}; name another, or auto")
    if format == VERL or "reward_model" in columns:
        lacks = ", ".join(f"`{name}`" for name in missing)
        raise ValueError(f"{where}: column {lacks} is missing {found}; the schema is {SCHEMA}")
    if near := [*_near(columns)]:
        raise ValueError(f"{where}: the columns {found} are those of no format; did you mean {' and '.join(near)}?")
    if begun := [each for each in LAYOUTS if each.question in columns]:
        truths = ", ".join(f"`{name}`" for name in dict.fromkeys(name for each in begun for name in each.truths))
        raise ValueError(f"{where}: no column has the answer to `{begun[0].question}` {found}; name it one of {truths}")
    others = ", ".join(str(each) for each in LAYOUTS)
    raise ValueError(
        f"{where}: the columns {found} are those of no format; name them as one of these does: {others}; verl: {SCHEMA}"
    )


def by_first_row(layout: Layout | None, row: Row, format: str) -> Layout | None:
    """Returns `qa` where `auto` has chosen `gsm8k` and the answer of the first row has no `MARK`: it is read alone."""
    if layout is not None and layout.name == "gsm8k" and format == AUTO and MARK not in str(row["answer"]):
        return next(each for each in LAYOUTS if each.name == "qa")
    return layout


def _near(columns: Sequence[str]) -> Iterator[str]:
    """Yields `RIGHT` for `FOUND` for columns whose names differ from a format's in letters' case alone."""
    known = {name for each in LAYOUTS for name in (each.question, *each.truths)} | {*VERL_COLUMNS}
    for column in columns:
        if column not in known and column.strip().lower() in known:
            yield f"`{column.strip().lower()}` for `{column}`"
