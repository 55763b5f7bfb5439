"""Tries the reward functions of a run on three rows of its training data before any worker starts: what each gives for
the right answer, a wrong and an empty one. They are called as in a run (`dapo.rewards.calling.tried`). Only a function
that gives no right answer a score ends the start: rows, and forms of an answer, may be unusual."""

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from dapo.answers.answer import agree, read_truth, truth_text
from dapo.config.facts.model_shape import cached_config
from dapo.config.paths import PKG_SCHEME, checked_data, resolve_path
from dapo.config.reward import LimitsConfig, RewardFunctionConfig
from dapo.config.reward_functions import SECTION, label_of, ready_name, section_of, source_functions
from dapo.config.schema import Config
from dapo.data.files import Chunk, read_chunks
from dapo.data.layouts import Reading
from dapo.data.sources import Files, train_files
from dapo.rewards.calling.loading import LoadedFunction, load
from dapo.rewards.calling.process import ForkServer
from dapo.rewards.calling.tried import Caller, Given, Row, fork_server
from dapo.rewards.selfcheck_code import solution_of

ROWS = 3
MAX_SHOWN = 60  # characters of an answer
LOOKED_AT = 100  # rows among which they are chosen, and whose prompts may ask for a form
OTHER = "-98765.4321"  # the wrong answer where all rows have the same truth
# Forms of an answer, by what a prompt that asks for it holds, in lower case; "": the answer alone.
FORMS = {
    "answer:": "Answer: {}",
    "####": "#### {}",
    "boxed": "\\boxed{{{}}}",
    "<think>": "<think>So it is.</think>\n<answer>{}</answer>",
    "<answer>": "<answer>{}</answer>",
    "": "{}",
}
ASK = {
    "answer:": "Think step by step. Then write Answer: and the final answer.",
    "####": "Think step by step. Then write #### and the final number.",
    "boxed": "Think step by step. Then write the final answer in \\boxed{}.",
    "<think>": "Think between <think> and </think>. Then write the final answer between <answer> and </answer>.",
    "<answer>": "Think step by step. Then write the final answer between <answer> and </answer>.",
}
# Forms that ready functions read; the first is the one that they are tried with.
READY = {"math": ("answer:", "boxed"), "math_verify": ("answer:", "boxed"), "gsm8k": ("####",), "format": ("<think>",)}
KINDS = ("right", "wrong", "empty")


@dataclass(frozen=True, slots=True)
class Reference:
    """The answer of one row. row: counted from 0. solution: the text to score. truth: as in the data. short: only the
    number or expression, to tell different ground truths apart. source, extra_info: the row's, for functions of the
    user's own."""

    row: int
    solution: str
    truth: str
    short: str
    source: str = "selfcheck"
    extra_info: dict[str, Any] = field(default_factory=dict)


def reference(row: int, truth: str, mark: str, **rest: Any) -> Reference:
    """Returns a reference in the form `mark`. truth: `reward_model.ground_truth` of a row."""
    short = truth_text(truth).rpartition("####")[2].strip()
    return Reference(row, FORMS[mark].format(short), truth, short, **rest)


def next_different(references: Sequence[Reference], index: int) -> Reference | None:
    own = read_truth(references[index].short)
    for step in range(1, len(references)):
        other = references[(index + step) % len(references)]
        if other.short != references[index].short and not agree(own, read_truth(other.short)):
            return other
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A row with the right and a wrong answer. program, other_program: reference solutions of it and of another row,
    for functions that run programs; "" without one."""

    row: Row
    right: str
    wrong: str
    program: str = ""
    other_program: str = ""

    def texts(self, mark: str) -> tuple[str, str]:
        return FORMS[mark].format(self.right), FORMS[mark].format(self.wrong)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Rows of one source. key: configuration key of its files. looked_at: rows whose prompts were searched. asked: the
    forms for which these prompts ask. made_for_it: whether model and data are of the same package, so that the model
    knows the form."""

    key: str
    cases: list[Case]
    looked_at: int
    asked: list[str]
    made_for_it: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What a function gave on one row. text: the right answer. mark: its form. wrong, empty: None where they were not
    tried. bare: what the right answer alone got, if that is another form and was tried."""

    text: str
    mark: str
    right: Given
    wrong: Given | None = None
    empty: Given | None = None
    bare: Given | None = None

    @property
    def tells(self) -> bool:
        """Whether the right answer has a better score than the wrong one."""
        right, wrong = self.right.score, self.wrong.score if self.wrong else None
        return right is not None and (wrong is None or right > wrong)

    def of(self, kind: str) -> Given | None:
        return {"right": self.right, "wrong": self.wrong, "empty": self.empty}[kind]


@dataclass(kw_only=True, slots=True)
class Trial:
    """One function of a run. key: of its entry in the configuration. name: for people. programs: whether its answers
    are programs. skipped: why it is not tried; "" if it is. answers: by row."""

    key: str
    name: str
    spec: RewardFunctionConfig
    sample: Sample | None
    programs: bool = False
    skipped: str = ""
    answers: list[Answers] = field(default_factory=list)

    def __str__(self) -> str:
        if self.skipped:
            return f"reward {self.name}: not tried: {self.skipped}"
        given = {kind: [one.of(kind) for one in self.answers] for kind in KINDS}
        right, wrong, empty = map(_values, given.values())
        rows = f"{len(self.answers)} row{'s' if len(self.answers) > 1 else ''}; right is {_cut(self.answers[0].text)}"
        return f"reward {self.name}: right answer {right}, wrong {wrong}, empty {empty} ({rows})"

    @property
    def where(self) -> str:
        return f"`{self.key}` ({self.spec.path})"

    @property
    def tells(self) -> bool:
        return any(one.tells for one in self.answers)

    @property
    def broken(self) -> bool:
        return bool(self.answers) and all(one.right.error for one in self.answers)

    def doubts(self) -> Iterator[str]:
        """Yields a line per missing score, and one for scores of None."""
        told = set[str]()
        for kind in KINDS:
            error = next((given.error for one in self.answers if (given := one.of(kind)) and given.error), "")
            if error and error not in told:
                told.add(error)
                text = f" {_cut(self.answers[0].text)}" if kind == "right" else ""
                yield f"{self.where} has no score for the {kind} answer{text}: {error}"
        nothing = [kind for kind in KINDS if any(_value(one.of(kind)) == "None" for one in self.answers)]
        if nothing:
            yield (
                f"{self.where} gave None for the {', '.join(nothing)} answer: such responses are unscorable and "
                "left out of training; have it give a number (a `return` may be missing)"
            )


def tried(cfg: Config) -> tuple[list[str], list[str], list[str]]:
    """Tries all functions, which must be loadable. Returns a line per function, warnings, and errors."""
    own = source_functions(cfg.data.sources)
    sections: list[list[Trial]] = []
    for entry, specs in {"": cfg.reward.functions, **own}.items():
        if (files := _files(cfg, entry, own)) is None:  # every source has functions of its own
            continue
        section, sample = section_of(entry) if entry else SECTION, _sample(cfg, files)
        sections.append([])
        for index, spec in enumerate(specs):
            function = load(spec, index=index, section=section)
            trial = Trial(
                key=f"{section}[{index}]",
                name=label_of(entry, named(spec)),
                spec=spec,
                sample=sample,
                programs=function.runs_programs,
                skipped=_skipped(function, sample),
            )
            sections[-1].append(trial)
    asyncio.run(_try_all([one for trials in sections for one in trials], cfg.reward.limits))
    lines, warnings, errors = list[str](), list[str](), list[str]()
    for trials in sections:
        for one in trials:
            found = list(one.doubts())
            if one.broken and not cfg.reward.limits.allow_network:  # else its server may be started later
                errors.append(f"{found[0]}; correct it, or start all the same with `trainer.preflight=false`")
                continue
            lines.append(str(one))
            warnings += found
            warnings += _unasked(one) if not cfg.rollout.function.path else ()
        warnings += _of_section(trials) if not cfg.reward.model.path else ()
    return lines, warnings, errors


def _of_section(trials: Sequence[Trial]) -> Iterator[str]:
    first = trials[0]
    if any(one.skipped or one.broken for one in trials):
        return
    if not any(one.tells or one.answers[0].right.score is None for one in trials):
        yield (
            f"{first.where} gives the same score for right and wrong answers: with such scores there is nothing to "
            f"learn. It was tried with {_cut(first.answers[0].text)} and the usual other forms; ground truths are texts"
        )
    elif first.tells and all(one.wrong and one.wrong.is_right for one in first.answers):
        yield (
            f"{first.where} gives wrong answers a positive score, which counts as right; give 0 or less, or a dict of "
            "`score` and `acc` (whether it is right)"
        )


def _unasked(trial: Trial) -> Iterator[str]:
    """Checks whether a function looks for a form of an answer for which no prompt asks."""
    sample, ready = trial.sample, ready_name(trial.spec.path)
    first = next((one for one in trial.answers if one.tells), None)
    if sample is None or first is None or ready not in (None, "math", "math_verify", "gsm8k"):
        return
    if not first.mark and not trial.programs:
        yield (
            f"{trial.where} takes {_cut(first.text)} for right, but no answer with words around it, such as "
            f"{_cut(FORMS['answer:'].format(first.text))}: a model that reasons is never right; read the end of the "
            "response"
        )
    read = READY[ready] if ready else (first.mark,)
    if not first.mark or sample.made_for_it or {*read} & {*sample.asked} or (first.bare and first.bare.is_right):
        return
    ask = f"'data.system_prompt=\"{ASK[first.mark]}\"'"
    if sample.key.startswith("data.sources"):
        ask = f'`system_prompt: "{ASK[first.mark]}"` in its entry of `data.sources`'
    yield (
        f"{trial.where} looks for {_cut(first.text)}, and none of the first {sample.looked_at} prompts of "
        f"`{sample.key}` asks for that form; ask the model for it: {ask}"
    )


def named(spec: RewardFunctionConfig) -> str:
    path = ready_name(spec.path) or (Path(spec.path).name if spec.path.endswith(".py") else spec.path)
    return path if spec.name == "compute_score" else f"{path}:{spec.name}"


def _skipped(function: LoadedFunction, sample: Sample | None) -> str:
    if function.asynchronous:
        return "it is async and may ask a server"
    if sample is None:
        return "its training data is no local file, or has rows that cannot be read"
    if function.runs_programs and not all(case.program for case in sample.cases):
        return "its rows hold no reference solution"
    return ""


async def _try_all(trials: Sequence[Trial], limits: LimitsConfig) -> None:
    wanted = [one for one in trials if not one.skipped]
    entries = {one.key if number else "": one for number, one in enumerate(wanted)}
    if not wanted:
        return
    try:
        async with fork_server({entry: one.spec for entry, one in entries.items()}, limits) as server:
            for entry, one in entries.items():
                one.answers = await answers(server, entry, one, limits)
    except (RuntimeError, ValueError, OSError) as error:  # such as a sandbox that only the workers' nodes have
        for one in wanted:
            if not one.answers:
                one.skipped = f"its process did not start: {error}"


async def answers(server: ForkServer, entry: str, trial: Trial, limits: LimitsConfig) -> list[Answers]:
    """Returns what a function gives on each row. The rows are tried at the same time, so that a function that never
    ends takes `wall_s` once."""
    assert trial.sample is not None
    ready, asked = ready_name(trial.spec.path), trial.sample.asked
    marks = [*asked, *(mark for mark in FORMS if mark not in asked)]  # all, those that the prompts ask for first
    if ready or trial.programs:
        marks = [*READY.get(ready or "", ("",))][:1]

    async def on(case: Case) -> Answers:
        give, until = Caller(server, entry, limits), time.monotonic() + limits.wall_s
        tries: list[Answers] = []
        for mark in marks:
            text, other = (case.program, case.other_program) if trial.programs else case.texts(mark)
            right = await give(case.row, text)
            wrong = None if right.ended else await give(case.row, other)
            tries.append(Answers(text=text, mark=mark, right=right, wrong=wrong))
            if tries[-1].tells or right.ended or time.monotonic() > until:
                break
        found = tries[-1] if tries[-1].tells else tries[0]
        if tries[-1].right.ended:
            return tries[-1]
        bare = await give(case.row, case.right) if found.tells and found.mark and not ready else None
        return replace(found, empty=await give(case.row, ""), bare=bare)

    return await asyncio.gather(*map(on, trial.sample.cases))


def _files(cfg: Config, entry: str, own: Collection[str]) -> Files | None:
    """Returns the first files that the functions of `entry` score; "" means `reward.functions`."""
    entries = [one for one in train_files(cfg.data) if one.reading.entry == entry or not entry]
    return next((one for one in entries if entry or one.reading.entry not in own), None)


def _sample(cfg: Config, files: Files) -> Sample | None:
    """Returns rows of the first file; None if it is not local or cannot be read, which loading the data reports."""
    first, model = files.files[0], cfg.model.path
    try:
        name = checked_data(first, key=files.key)
        found = sample_of(name, files.key, files.reading, template(model)) if Path(name).is_file() else None
    except (ValueError, LookupError, TypeError):
        return None
    package = model.split("/")[:3] if model.startswith(PKG_SCHEME) else []
    return found and replace(found, made_for_it=first.split("/")[:3] == package)


def template(model: str) -> str:
    """Returns the text of the files that hold a model's chat template; "" without them."""
    folder = Path(resolve_path(model))
    if not folder.is_dir() and (cached := cached_config(model)):
        folder = cached.parent
    files = [folder / name for name in ("chat_template.jinja", "tokenizer_config.json")]
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())


def sample_of(name: str, key: str, reading: Reading, also: str = "") -> Sample:
    """Returns rows of a local file, each with another truth. also: what a model reads beside the prompts. Raises
    ValueError, LookupError or TypeError for unusable rows."""
    told = [reading.system_prompt, also]
    found: list[tuple[Reference, Chunk, int]] = []
    rows = ((chunk, place) for chunk in read_chunks(name, key, reading) for place in range(len(chunk.prompts)))
    for chunk, place in islice(rows, LOOKED_AT):
        told.append(str(chunk.prompts[place]))
        truth = chunk.reward_models[place]["ground_truth"]
        found.append((reference(chunk.first_row + place, truth, ""), chunk, place))
    if not found:
        raise ValueError(f"{name} has no rows; give a file with reference answers")
    first = {one.short: (one, chunk, place) for one, chunk, place in reversed(found)}  # the first row of each truth
    chosen = sorted(first.values(), key=lambda each: each[0].row)[:ROWS]
    references = [one for one, _, _ in chosen]
    rests = [chunk.rest(place) for _, chunk, place in chosen]
    programs = [solution_of(rest) for rest in rests]
    cases = [
        Case(
            row=Row(source=rest["data_source"], truth=one.truth, extra_info=rest.get("extra_info") or {}),
            right=one.short,
            wrong=other.short if (other := next_different(references, index)) else OTHER,
            program=programs[index],
            other_program=programs[index - 1] if len(programs) > 1 else "",
        )
        for index, (one, rest) in enumerate(zip(references, rests, strict=True))
    ]
    text = "\n".join(told).lower()
    asked = [mark for mark in ASK if mark in text]
    return Sample(key=key, cases=cases, looked_at=len(found), asked=asked)


def _values(given: Sequence[Given | None]) -> str:
    """Returns what was given on all rows: one value where they are equal."""
    values = [_value(one) for one in given]
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def _value(given: Given | None) -> str:
    if given is None:
        return "not tried"
    if given.error:
        return "no score"
    return "None" if given.score is None else str(round(given.score, 4))


def _cut(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "...")
