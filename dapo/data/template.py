"""Renders messages with the model's chat template and `data.chat_template_kwargs`. Prompts, evaluation and rollout
functions all use it, so that a model always sees the same format."""

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
DATE_FUNCTION = "strftime_now"  # chat templates call it for the date


def template_text(tokenizer: Any) -> str:
    """Returns the text of the chat template; all of them as JSON if the tokenizer has several."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template)


def asked(tokenizer: Any, messages: Messages, given: Mapping[str, Any]) -> str:
    """Returns the text of a prompt, with the beginning of the model's turn at its end. Raises ValueError if the
    template rejects the messages, or drops or changes the content of one. Assistant messages are exempt: templates may
    drop their reasoning. given: as for `rendered`."""
    try:
        text = rendered(tokenizer, messages, given)
    except Exception as error:  # a template may raise anything
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
    """Raises ValueError if there is no chat template, or if it does not use all of `given`."""
    if tokenizer.chat_template is None:
        raise ValueError(
            "`model.path`: its tokenizer has no chat template, and prompts are lists of messages; take an instruct "
            "model or put a `chat_template.jinja` next to its tokenizer.json"
        )
    if lines := [*unread(tokenizer, given)]:
        raise ValueError("\n".join(lines))


def rendered(tokenizer: Any, messages: Messages, given: Mapping[str, Any], *, generation: bool = True) -> str:
    """Returns the text of a conversation. generation: whether to end with the beginning of the model's turn. Raises
    whatever the template raises."""
    turns = [{"role": role, "content": content} for role, content in messages]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation, **given))


def unread(tokenizer: Any, given: Mapping[str, Any]) -> Iterator[str]:
    words = sorted(set(re.findall(r"[A-Za-z_]\w*", template_text(tokenizer))))
    for name in given:
        if name not in words:
            near = nearest(name, words) or "leave it out"
            yield f"`{KEY}.{name}` ({given[name]}): the chat template of `model.path` reads no such name; {near}"


@contextmanager
def clock_at(today: datetime) -> Iterator[None]:
    """Makes templates write this date. transformers does not let a caller replace the date function, so this replaces
    `datetime` in its module."""
    from transformers.utils import chat_template_utils

    before = chat_template_utils.datetime
    chat_template_utils.datetime = type("Clock", (datetime,), {"now": classmethod(lambda cls, tz=None: today)})
    try:
        yield
    finally:
        chat_template_utils.datetime = before
