"""Writes messages as the model's chat template does, with what a person gives it beside them.

In: a tokenizer of transformers, messages, `data.chat_template_kwargs`. Out: text. Prompts, evaluation and the turns of
rollout functions all come from here, so that one model never reads two forms of a conversation.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from dapo.config.names import nearest
from dapo.data.values import shown
from dapo.types import Messages

KEY = "data.chat_template_kwargs"
DATE_FUNCTION = "strftime_now"  # what chat templates call for the date


def template_text(tokenizer: Any) -> str:
    """Returns the text of the chat template, of all where the tokenizer has several by name."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template)


def asked(tokenizer: Any, messages: Messages, given: Mapping[str, Any]) -> str:
    """Returns the text of a prompt, which ends with the beginning of the model's turn. Raises ValueError where the
    template refuses the messages, or leaves out or changes what one of them says; of an assistant's it may, as thoughts
    are left out. given: as for `rendered`."""
    try:
        text = rendered(tokenizer, messages, given)
    except Exception as error:  # templates are programs of the model's maker and raise what they like
        raise ValueError(
            f"the chat template of `model.path` refuses the messages ({error}); use the roles that it knows"
        ) from error
    for role, content in messages:
        if role != "assistant" and content.strip() not in text:
            raise ValueError(
                f"the chat template of `model.path` leaves out what the {role} says, or changes it ({shown(content)}): "
                "it must write `content` as the text that it is; correct chat_template.jinja, or use the roles that it "
                "knows"
            )
    return text


def check_template(tokenizer: Any, given: Mapping[str, Any]) -> None:
    """Raises ValueError where there is no chat template, or where it does not read what it is given."""
    if tokenizer.chat_template is None:
        raise ValueError(
            "`model.path`: its tokenizer has no chat template, and prompts are lists of messages; take an instruct "
            "model or put a `chat_template.jinja` next to its tokenizer.json"
        )
    if lines := [*unread(tokenizer, given)]:
        raise ValueError("\n".join(lines))


def rendered(tokenizer: Any, messages: Messages, given: Mapping[str, Any], *, generation: bool = True) -> str:
    """Returns the text of a conversation. given: `data.chat_template_kwargs`. generation: whether it ends with the
    beginning of the model's turn. Raises what the template raises: it is a program of the model's maker."""
    turns = [{"role": role, "content": content} for role, content in messages]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation, **given))


def unread(tokenizer: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each name that the template does not read, which it would pass over in silence."""
    words = sorted(set(re.findall(r"[A-Za-z_]\w*", template_text(tokenizer))))
    for name in given:
        if name not in words:
            near = nearest(name, words) or "leave it out"
            yield f"`{KEY}.{name}` ({given[name]}): the chat template of `model.path` reads no such name; {near}"


@contextmanager
def clock_at(today: datetime) -> Iterator[None]:
    """Has templates write this date: transformers hands no function of a caller's on to them, and asks `datetime` in
    its own module."""
    from transformers.utils import chat_template_utils

    before = chat_template_utils.datetime
    chat_template_utils.datetime = type("Clock", (datetime,), {"now": classmethod(lambda cls, tz=None: today)})
    try:
        yield
    finally:
        chat_template_utils.datetime = before
