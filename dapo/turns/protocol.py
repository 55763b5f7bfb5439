"""The interface of rollout functions, and the messages between them and the driver.

A function is `async def rollout(prompt, generate, sampling, **kwargs) -> Trajectory`. The driver keeps the tokens
sampled so far, so that no sampled token is decoded and tokenized again.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """The policy's output of one turn. token_ids: includes the end-of-text token or stop string. text: the decoded
    tokens, without special tokens. finish_reason: "stop", or "length" at `max_tokens` or the response's cap."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """The result of a rollout function. text: the response for the reward functions."""

    text: str


class Generate(Protocol):
    """Samples turns from the policy; passed to a rollout function. tokenizer: the policy's, of transformers."""

    tokenizer: Any

    def __call__(
        self, token_ids: Sequence[int] = (), *, max_tokens: int | None = None, stop: str | Sequence[str] | None = None
    ) -> Awaitable[Generated]:
        """Appends tokens that the policy did not sample, and samples the next turn. max_tokens: of this turn; None:
        what is left of the response. stop: strings that end the turn and are included in it. Tokens that do not fit
        into `data.max_response_length` are not appended: then nothing is sampled, and the reason is "length"."""

    def after(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Returns the chat template's tokens after the last turn: its end, if the policy did not sample it, messages as
        (role, content), and the beginning of the policy's next turn. Special tokens in a content become plain text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Requests a turn from the driver; fields as of `Generate`. Made by `dapo.turns.session`."""

    token_ids: tuple[int, ...]
    max_tokens: int | None
    stop: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A function raised, timed out or returned no `Trajectory`. Made by `dapo.turns.session`."""

    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Queued:
    """A function still waits for a shared resource (`dapo.turns.patience`); call again. Made by
    `dapo.turns.session`."""


Step = Ask | Trajectory | Failed | Queued
