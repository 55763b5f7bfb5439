"""Keeps responses that an engine has put down: what they have so far, and how any engine takes them up.

    engine A ─ tokens, log-probabilities, versions ─▶ driver ─ prompt + tokens as one prompt, a fresh seed ─▶ engine B

In: the parts of a response, in their order. Out: one `Response` of all of them, in which every token stands once, with
the log-probability and version of the policy that sampled it.
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
    """Says from where an engine generates a response. Made by `Unfinished`, consumed by `RolloutWorker.generate`.

    token_ids: [K], those that it has; they follow the prompt and count towards its cap. seed: of what follows them.
    """

    token_ids: Int32Array
    seed: int


@dataclass(kw_only=True, slots=True)
class Unfinished:
    """Holds a response that has not ended. seed: of its first token. so_far: the parts of it that were put down."""

    seed: int
    so_far: Response = NOTHING

    def start(self) -> Start:
        """Returns where its next part begins."""
        tokens = self.so_far.token_ids
        return Start(token_ids=tokens, seed=continued_seed(self.seed, len(tokens)))

    def add(self, part: Response) -> Response:
        """Appends the next part, and returns the response as far as it is now; see `joined`."""
        self.so_far = joined(self.so_far, part)
        return self.so_far


def joined(first: Response, then: Response) -> Response:
    """Returns one response of two parts. It ended as the second did, whose `text` must be of both; it names the engine
    that ended it, and its seconds are those of both, without the time between them."""
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
    """Returns the spans with neighbours of one version made one."""
    found: list[VersionSpan] = []
    for span in spans:
        if found and found[-1].version == span.version:
            span = replace(span, start=found.pop().start)
        found.append(span)
    return found
