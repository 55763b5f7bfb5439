"""Keeps responses that were aborted on an engine and that any engine can resume.

    engine A ─ tokens, log-probabilities, versions ─▶ driver ─ prompt + tokens as one prompt, a fresh seed ─▶ engine B

The parts of a response are joined into one `Response`. Every token occurs once, with the log-probability and version of
the policy that sampled it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from dapo.sampling.seeds import continued_seed
from dapo.types import Int32Array, Response, VersionSpan

NOTHING = Response(
    token_ids=np.zeros(0, dtype=np.int32),
    rollout_logprobs=np.zeros(0, dtype=np.float32),
    text="",
    finish_reason="abort",
    policy_versions=(),
    engine=-1,
    seconds=0.0,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where an engine starts generating a response. Made by `Unfinished`, consumed by `RolloutWorker.generate`.
    token_ids: [K], the response tokens so far, which follow the prompt and count towards the length limit. seed: for
    the next tokens."""

    token_ids: Int32Array
    seed: int


@dataclass(kw_only=True, slots=True)
class Unfinished:
    """A response that has not ended. seed: of its first token. so_far: its joined parts."""

    seed: int
    so_far: Response = NOTHING

    def start(self) -> Start:
        tokens = self.so_far.token_ids
        return Start(token_ids=tokens, seed=continued_seed(self.seed, len(tokens)))

    def add(self, part: Response) -> Response:
        self.so_far = joined(self.so_far, part)
        return self.so_far


def joined(first: Response, then: Response) -> Response:
    """Joins two parts of a response. `text`, finish reason and engine are those of the second part, whose `text` must
    cover both. `seconds` is the sum of both, without the time between them."""
    length = len(first.token_ids)
    if not length:
        return replace(then, seconds=first.seconds + then.seconds)
    later = [replace(span, start=span.start + length, end=span.end + length) for span in then.policy_versions]
    return replace(
        then,
        token_ids=np.concatenate([first.token_ids, then.token_ids]),
        rollout_logprobs=np.concatenate([first.rollout_logprobs, then.rollout_logprobs]),
        policy_versions=tuple(_merged([*first.policy_versions, *later])),
        seconds=first.seconds + then.seconds,
    )


def _merged(spans: Iterable[VersionSpan]) -> list[VersionSpan]:
    found: list[VersionSpan] = []
    for span in spans:
        if found and found[-1].version == span.version:
            span = replace(span, start=found.pop().start)
        found.append(span)
    return found
