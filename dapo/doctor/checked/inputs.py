"""Looks at what a run learns from: tokenizer, chat template, prompts, held-out sets, and the verifier on their answers.

In: a `Subject`. Out: one `Finding` per function; each runs on the driver alone.
"""

import importlib
from datetime import datetime
from typing import Any

from dapo.data.template import clock_at, rendered, unread
from dapo.doctor.finding import Finding, fault, ok, warning
from dapo.doctor.subject import Subject
from dapo.rewards.calling.by_entry import source_functions
from dapo.rewards.calling.loading import ready_name
from dapo.rewards.selfcheck import FUNCTIONS, reference, verdicts

DAYS = (datetime(2001, 2, 3), datetime(2034, 11, 29))
QUESTION = "What is 12 + 30? Give your reasons; end with 'Answer: N'."
SLOW = {"math_verify": 200}  # references of which one takes milliseconds
SAMPLE = 2000  # of the others
BAD_SHARE = 0.01  # of references that no right answer matches


def settings(subject: Subject) -> Finding:
    """Tries what a run tries before it starts workers: schedule, model, reward functions and their known answers,
    functions of a person's own, sinks."""
    from dapo.driver.preflight import preflight  # loads torch

    try:
        preflight(subject.cfg)
    except ValueError as error:
        return fault(str(error), "correct each")
    names = ", ".join(ready_name(spec.path) or spec.path for spec in subject.cfg.reward.functions)
    return ok(f"schedule {subject.cfg.actor.optim.lr_scheduler}, reward functions {names}")


def tokenizer(subject: Subject) -> Finding:
    """Looks whether text survives encoding and decoding, and whether there is an end of sequence."""
    path = subject.cfg.model.path
    try:
        tokenizer = subject.tokenizer
    except ValueError as error:  # a sentence with the remedy
        return fault(str(error), "")
    except Exception as error:  # the files of a model can be wrong in any way
        return fault(
            f"`model.path` ({path}): its tokenizer does not load ({type(error).__name__}: {_first(error)})",
            "copy the tokenizer's files beside the weights",
        )
    found = f"{type(tokenizer).__name__} of {len(tokenizer)} tokens"
    rows = subject.shape.vocab_size if subject.shape else None
    if rows is not None and len(tokenizer) > rows:
        return fault(
            f"{found}, and the model's embedding has {rows} rows (vocab_size)",
            "take the tokenizer that belongs to these weights",
        )
    if tokenizer.eos_token_id is None:
        return fault(f"{found} has no end of sequence, so that every response runs into the cap", "set `eos_token`")
    return ok(found)


def template(subject: Subject) -> Finding:
    """Looks whether the chat template is there, shows what a person wrote, and opens the model's turn."""
    tokenizer, path = subject.tokenizer, subject.cfg.model.path
    if tokenizer.chat_template is None:
        return fault(
            f"`model.path` ({path}): its tokenizer has no chat template, and prompts are lists of messages",
            "take an instruct model, or put a `chat_template.jinja` next to its tokenizer.json",
        )
    given = subject.cfg.data.chat_template_kwargs
    if lines := [*unread(tokenizer, given)]:
        return fault("\n".join(lines), "")
    try:
        first, later = (_rendered(tokenizer, given, day) for day in DAYS)
        bare = _rendered(tokenizer, given, DAYS[0], generation=False)
    except Exception as error:  # templates are programs of the model's maker and raise what they like
        return fault(f"the chat template refuses a user's message ({_first(error)})", "use a template that takes one")
    if QUESTION not in first:
        return fault("the chat template leaves out what the user says, or changes it", "correct chat_template.jinja")
    if first == bare:
        return warning(
            "the chat template does the same with and without add_generation_prompt: nothing opens the model's turn",
            "end it with the beginning of an assistant's message where add_generation_prompt is true",
        )
    ids = tokenizer(first, add_special_tokens=False)["input_ids"]
    if (decoded := tokenizer.decode(ids, skip_special_tokens=False)) != first and "".join(decoded.split()) != "".join(
        first.split()
    ):
        return fault(f"{first!r} is {decoded!r} after encoding and decoding", "see tokenizer.json for lost characters")
    if first != later:
        return warning(
            "its output has today's date: a run keeps the date of its first start, but an evaluation or a server on "
            "another day gives the model other prompts",
            "write a fixed date into chat_template.jinja",
        )
    return ok(f"{len(ids)} tokens for a question of {len(QUESTION)} characters, the same every day")


def _rendered(tokenizer: Any, given: dict[str, Any], day: datetime, *, generation: bool = True) -> str:
    with clock_at(day):
        return rendered(tokenizer, (("user", QUESTION),), given, generation=generation)


def prompts(subject: Subject) -> Finding:
    """Looks for rows that repeat a prompt, contradict each other, or are too long."""
    loaded, report = subject.prompts
    found = f"{report.kept} prompts of {report.rows} rows"
    notes = []
    if report.duplicates:
        notes.append(f"{report.duplicates} rows repeat a prompt, which counts once")
    if report.contradictory:
        notes.append(f"{report.contradictory} prompts have ground truths that disagree, and are left out")
    if report.too_long:
        notes.append(f"{report.too_long} are longer than `data.max_prompt_length`, and are left out")
    if report.kept < subject.cfg.data.train_batch_size:
        notes.append(f"a batch takes {subject.cfg.data.train_batch_size}, some of them several times")
    if notes:
        return warning(f"{found}; {'; '.join(notes)}", "correct `data.train_files` if that is not meant")
    return ok(f"{found}, the longest of {max(len(prompt.token_ids) for prompt in loaded)} tokens")


def held_out(subject: Subject) -> Finding:
    """Loads the held-out sets and looks for their problems among the training prompts."""
    train = {prompt.messages for prompt in subject.prompts[0]}
    sets = subject.held_out()
    counts = ", ".join(f"{one.name or 'one set'}: {len(one.prompts)}" for one in sets)
    known = sum(prompt.messages in train for one in sets for prompt in one.prompts)
    if known:
        return warning(
            f"{known} held-out problems are training prompts too ({counts})",
            "take them out of `data.train_files`: the accuracy on them measures memory",
        )
    return ok(f"problems in {counts}; none is trained on" if sets else "no held-out set")


def verifier(subject: Subject) -> Finding:
    """Scores reference answers of the run's own data, where `reward.functions` score it: each must be right for itself,
    and wrong for another."""
    names = [ready_name(spec.path) for spec in subject.cfg.reward.functions]
    found, bad = [], 0.0
    first = ""
    for name in filter(None, names):
        if name not in FUNCTIONS:
            continue
        own = source_functions(subject.cfg.data.sources)
        every = [prompt for prompt in subject.prompts[0] if prompt.entry not in own]
        if not every:
            continue
        step = -(-len(every) // SLOW.get(name, SAMPLE))
        references = [reference(prompt.id, prompt.ground_truth, name) for prompt in every[::step]]
        wrong = verdicts(references, importlib.import_module(f"dapo.rewards.{name}").compute_score).lines
        found.append(f"{name}: {len(references) - len(wrong)} of {len(references)} reference answers as they should be")
        bad, first = max(bad, len(wrong) / len(references)), first or "".join(wrong[:1])
    if not found:
        return ok("a function of your own: `canaries` beside it are its test")
    if bad:
        say = fault if bad > BAD_SHARE else warning
        return say(
            f"{'; '.join(found)}: {first}",
            "no response to such a prompt can be right: correct its ground truth, or take another of "
            f"{', '.join(FUNCTIONS)} (`python -m dapo.rewards.selfcheck FILE` lists them)",
        )
    return ok("; ".join(found))


def _first(error: BaseException) -> str:
    """Returns the first line of a message, shortened."""
    return (str(error).strip().splitlines() or [""])[0][:200]
