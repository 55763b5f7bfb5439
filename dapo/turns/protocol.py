"""Defines what a rollout function sees, and what it and the driver tell each other.

A function is `async def rollout(prompt, generate, sampling, **kwargs) -> Trajectory`. It never holds the tokens that
the policy sampled up to the next turn: the driver does, so that none is tokenised twice.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """Holds what the policy sampled in one turn. token_ids: end-of-text or stop string included. text: of them, without
    special tokens. finish_reason: "stop", or "length" at `max_tokens` or the response's cap."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """Holds what a rollout function returns. text: what the reward functions read as the response."""

    text: str


class Generate(Protocol):
    """Lets the policy go on. Handed to a rollout function. tokenizer: the policy's, of transformers."""

    tokenizer: Any

    def __call__(
        self, token_ids: Sequence[int] = (), *, max_tokens: int | None = None, stop: str | Sequence[str] | None = None
    ) -> Awaitable[Generated]:
        """Appends tokens that the policy reads and did not sample, and lets it sample the next turn.

        max_tokens: of this turn; None: as many as the response may still have. stop: strings that end it, which are
        its last characters. What does not fit into `data.max_response_length` any more is not appended: then nothing
        is sampled, and the reason is "length".
        """

    def after(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Returns the tokens by which the chat template goes on behind the last turn: its end, where the policy did
        not sample it, messages as (role, content), and the beginning of the policy's next turn. A content opens and
        ends no turn: special tokens in it become text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Asks the driver for a turn; fields as those of `Generate`. Made by `dapo.turns.session`."""

    token_ids: tuple[int, ...]
    max_tokens: int | None
    stop: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """Says that a function raised, ran into its deadline or gave no `Trajectory`. Made by `dapo.turns.session`."""

    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Queued:
    """Says that a function has still to wait for a place (`dapo.turns.patience`): it is to be asked again. Made by
    `dapo.turns.session`."""


Step = Ask | Trajectory | Failed | Queued
