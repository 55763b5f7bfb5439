"""Yields problems of tokenizer, chat template and data that do not stop a run, one line each, with the remedy. A run
logs them as warnings, and `dapo.doctor` prints them."""

import importlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from dapo.config.facts.model_shape import UnknownShape, read_config, text_part
from dapo.config.reward_functions import ready_name, source_functions
from dapo.config.schema import Config
from dapo.data.template import asked, check_template, clock_at, rendered
from dapo.data.tokenizer import TEXT
from dapo.data.values import shown
from dapo.rewards.selfcheck import FUNCTIONS, mark_of, no_answers, verdicts
from dapo.rewards.trial import reference
from dapo.types import HeldOut, Messages, Prompt

DAYS = (datetime(2001, 2, 3), datetime(2034, 11, 29))
QUESTION: Messages = (("user", TEXT),)
SHORT = 3  # characters; a shorter special token may be ordinary text
SLOW = {"math_verify": 200}  # number of references for slow functions (milliseconds each)
SAMPLE = 2000  # number of references for the others

# (function, number of ground truths tried, one line per failure, one line per ground truth that is not an answer)
Judged = tuple[str, int, list[str], list[str]]


def of_all(cfg: Config, tokenizer: Any, prompts: Sequence[Prompt], held_out: Sequence[HeldOut]) -> Iterator[str]:
    yield from of_tokenizer(tokenizer, cfg.model.path)
    yield from of_template(tokenizer, cfg.data.chat_template_kwargs)
    yield from of_prompts(prompts, cfg.data.train_batch_size, tokenizer)
    yield from of_held_out(prompts, held_out)
    yield from of_truths(judged_truths(cfg, prompts))


def of_tokenizer(tokenizer: Any, path: str) -> Iterator[str]:
    """Checks for tokens without an embedding row; `dapo.data.tokenizer.check_rows` rejects prompts that contain one."""
    try:
        rows = text_part(read_config(path)).get("vocab_size")
    except UnknownShape:
        return
    if isinstance(rows, int) and len(tokenizer) > rows:
        yield (
            f"the tokenizer has {len(tokenizer)} tokens, and the model's embedding {rows} rows (vocab_size in "
            "config.json); take the tokenizer that belongs to these weights, unless no prompt has the last of them"
        )


def of_template(tokenizer: Any, given: dict[str, Any]) -> Iterator[str]:
    """Checks whether the chat template opens the model's turn and whether it writes a date. Raises ValueError if there
    is no template, or if it leaves out a question."""
    check_template(tokenizer, given)
    texts = []
    for day in DAYS:
        with clock_at(day):
            texts.append(asked(tokenizer, QUESTION, given))
    with clock_at(DAYS[0]):
        bare = rendered(tokenizer, QUESTION, given, generation=False)
    if texts[0] == bare:
        yield (
            "the chat template does the same with and without add_generation_prompt: nothing opens the model's turn; "
            "end it with the beginning of an assistant's message where add_generation_prompt is true"
        )
    if texts[0] != texts[1]:
        yield (
            "the chat template writes today's date: a run keeps the date of its first start, but an evaluation or a "
            "server on another day gives the model other prompts; write a fixed date into chat_template.jinja"
        )


def of_prompts(prompts: Sequence[Prompt], batch: int, tokenizer: Any) -> Iterator[str]:
    marks = [mark for mark in tokenizer.all_special_tokens if len(mark) >= SHORT]
    found = [(prompt, mark) for prompt in prompts for _, text in prompt.messages for mark in marks if mark in text]
    if found:
        count, (first, mark) = len({prompt.id for prompt, _ in found}), found[0]
        yield (
            f"{count} prompts have special tokens of the model in their messages ({mark!r} in {shown(first.text)}), as "
            "where a chat template has been applied already; give messages or the question alone"
        )
    if 0 < len(prompts) < batch:
        yield f"{len(prompts)} prompts, and a batch takes {batch} (`data.train_batch_size`), some of them several times"


def of_held_out(prompts: Sequence[Prompt], sets: Sequence[HeldOut]) -> Iterator[str]:
    train = {prompt.messages for prompt in prompts}
    if known := sum(prompt.messages in train for one in sets for prompt in one.prompts):
        counts = ", ".join(f"{one.name or 'one set'}: {len(one.prompts)}" for one in sets)
        yield (
            f"{known} held-out problems are training prompts too ({counts}); take them out of `data.train_files`: the "
            "accuracy on them measures memory"
        )


def of_truths(judged: Iterable[Judged]) -> Iterator[str]:
    """Checks for ground truths that a ready function of `reward.functions` cannot verify, or that are not answers."""
    for name, looked, wrong, none in judged:
        yield from (f"{name}: {line}" for line in none[:1])
        if wrong:
            yield (
                f"{name}: {looked - len(wrong)} of {looked} reference answers as they should be: {wrong[0]}; no "
                "response to such a prompt can be right: correct its ground truth, or take another of "
                f"{', '.join(FUNCTIONS)} (`python -m dapo.rewards.selfcheck FILE` lists them)"
            )


def judged_truths(cfg: Config, prompts: Sequence[Prompt]) -> Iterator[Judged]:
    """Runs each ready function that compares with ground truths on those of the prompts: each ground truth must be
    correct against itself and wrong against another."""
    own = source_functions(cfg.data.sources)
    every = [prompt for prompt in prompts if prompt.entry not in own]
    for name in dict.fromkeys(ready_name(spec.path) for spec in cfg.reward.functions):
        if name in FUNCTIONS and name != "code" and every:
            step = -(-len(every) // SLOW.get(name, SAMPLE))
            references = [reference(prompt.id, prompt.ground_truth, mark_of(name)) for prompt in every[::step]]
            compute_score = importlib.import_module(f"dapo.rewards.{name}").compute_score
            yield name, len(references), verdicts(references, compute_score).lines, no_answers(references)
