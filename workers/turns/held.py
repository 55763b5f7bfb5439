"""Accumulates one response of several turns on the driver."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dapo.types import Int32Array, Response, VersionSpan


@dataclass(kw_only=True, slots=True)
class Held:
    """A response so far. cut: it has reached its length limit."""

    token_ids: list[Int32Array] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    mask: list[np.ndarray] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    length: int = 0
    engine: int = -1
    seconds: float = 0.0
    cut: bool = False

    def give(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not sample."""
        if token_ids:
            count = len(token_ids)
            self._append(np.array(token_ids, np.int32), np.full(count, np.nan, np.float32), sampled=False)

    def take(self, part: Response) -> None:
        for span in part.policy_versions:
            moved = replace(span, start=span.start + self.length, end=span.end + self.length)
            if self.spans and (self.spans[-1].version, self.spans[-1].end) == (moved.version, moved.start):
                moved = replace(moved, start=self.spans.pop().start)
            self.spans.append(moved)
        self._append(part.token_ids, part.rollout_logprobs, sampled=True)
        self.engine, self.seconds = part.engine, self.seconds + part.seconds

    def _append(self, token_ids: Int32Array, logprobs: np.ndarray, *, sampled: bool) -> None:
        self.token_ids.append(token_ids)
        self.logprobs.append(logprobs)
        self.mask.append(np.full(len(token_ids), sampled))
        self.length += len(token_ids)

    def all_ids(self, prompt: Int32Array) -> Int32Array:
        return np.concatenate([prompt, *self.token_ids]) if self.token_ids else prompt

    def response(self, finish_reason: str, text: str = "") -> Response:
        mask = np.concatenate([np.zeros(0, np.bool_), *self.mask])
        return Response(
            token_ids=np.concatenate([np.zeros(0, np.int32), *self.token_ids]),
            rollout_logprobs=np.concatenate([np.zeros(0, np.float32), *self.logprobs]),
            text=text,
            finish_reason=finish_reason,
            policy_versions=tuple(self.spans),
            engine=self.engine,
            seconds=self.seconds,
            token_mask=None if mask.all() else mask,
        )
