"""The records that flow through a step, in the order in which they are made. Every record is frozen; a later stage has
a later type. Token arrays are numpy, because a step of 512 x 16 responses pickles several times faster as arrays than
as lists."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
UInt8Array = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Experts = NDArray[np.unsignedinteger[Any]]  # [tokens, layers, k]: the k experts that a token passed through
LEAST_LOGPROB = -1e4  # vLLM gives -inf, in places a large negative number, to a token that cannot be sampled
Messages = tuple[tuple[str, str], ...]  # (role, content) of each message


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One distinct problem. Made by `dapo.data`, consumed by the stream and the reward functions.

    id: position among the distinct prompts kept after filtering. source: `data_source` of the row, passed to the reward
    function. messages: the conversation before the policy's chat template; a reward model applies its own template.
    text: the prompt after the chat template. token_ids: [P], the engine's input. entry: name of the row's entry of
    `data.sources`; "" without entries.
    """

    id: int
    source: str
    messages: Messages
    text: str
    token_ids: Int32Array
    ground_truth: str
    extra_info: dict[str, Any]
    entry: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """One set of held-out problems. Made by `dapo.data.sources`, consumed by `dapo.evaluation`. name: in
    `data.val_files`; "" for the set of a plain list. samples: number of answers per prompt."""

    name: str
    prompts: tuple[Prompt, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One visit of the stream to a prompt. Made by `dapo.data`. index: counts visits from 0 over the whole run; in an
    evaluation it is the prompt's id."""

    index: int
    prompt: Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters of one group; seeds are passed separately per response. Made by
    `dapo.sampling.stream.sampling_of`, consumed by `workers.rollout`. n: responses per prompt. max_tokens: limit per
    response. stop: strings that end it, kept as its last characters. logprobs: whether to return the tokens'
    log-probabilities, as training needs; they cost engine time. support: most tokens of a `Support` per position; 0:
    none is returned. support_logprobs: whether it has log-probabilities. experts: whether to return the experts of each
    token."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    logprobs: bool = True
    support: int = 0
    support_logprobs: bool = False
    experts: bool = False

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Request:
    """A group of responses to one prompt. Made by `dapo.sampling` and `dapo.evaluation`, consumed by the engine pool's
    `generate`. key: names the group for `abort`. prompt: [P]. seeds: of each response. background: it gives way to
    other groups. problem: the record that the prompt belongs to, for the rollout function if there is one."""

    key: str
    prompt: Int32Array
    sampling: Sampling
    seeds: Sequence[int]
    background: bool = False
    problem: Prompt | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a response were sampled by policy `version` (number of completed updates). The first span
    may be empty: the keys of the prompt may be of that policy (`weight_sync.keep_kv_cache`)."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """The engine's most likely tokens at each of R positions. Under truncated sampling (top-k, top-p, min-p) they are
    all tokens that could be sampled there, so that actors can compute the same distribution; else those that Score
    Centering needs.

    counts: [R] uint16, tokens per position; 0 where the policy did not sample. token_ids: [sum of counts], position by
    position, the most likely first. logprobs: of the sampling policy, likewise; None unless they were asked for.
    """

    counts: NDArray[np.uint16]
    token_ids: Int32Array
    logprobs: Float32Array | None = None

    def where(self, positions: Mask) -> "Support":
        """Returns the support at the positions where the mask [R] is true."""
        chosen = np.repeat(positions, self.counts)
        logprobs = None if self.logprobs is None else self.logprobs[chosen]
        return Support(counts=self.counts[positions], token_ids=self.token_ids[chosen], logprobs=logprobs)


def joined_support(parts: Sequence[tuple[Support | None, int]]) -> Support | None:
    """Joins the support of parts of a response, each with its number of tokens; a part without has none at any
    position. Returns None if no part has any."""
    found = [support for support, _ in parts if support is not None]
    if not found:
        return None
    counts = [np.zeros(length, np.uint16) if support is None else support.counts for support, length in parts]
    logprobs = [support.logprobs for support in found if support.logprobs is not None]
    return Support(
        counts=np.concatenate(counts),
        token_ids=np.concatenate([support.token_ids for support in found]),
        logprobs=np.concatenate(logprobs) if logprobs else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One sampled answer. Made by `workers.rollout`, consumed by the reward workers and `dapo.algorithm.batch`.

    token_ids: [R], with the end-of-text token. rollout_logprobs: [R], natural log, of the sampling policy; NaN without
    `Sampling.logprobs`. text: empty if aborted. finish_reason: of the engine: "stop", "length" (token limit), "abort";
    "error" if `rollout.function` failed.
    engine: number of the one that finished it. seconds: from the request to the last token, with queueing in an engine
    but without time between an abort and its continuation. For a response from a checkpoint or journal they are -1 and
    NaN, because another fleet generated it. token_mask: [R], true for tokens that the policy sampled; the others were
    inserted between turns (a tool's answer, feedback), their log-probability is meaningless, and no span covers them.
    None: all were sampled. support: with `Sampling.support`. experts: [P + R - 1, layers, k], of the prompt's tokens
    and all response tokens but the last; no engine computes that one, nor tokens inserted at the end, whose rows are
    missing. Layers without experts have zeros. None without `Sampling.experts` and without response tokens.
    """

    token_ids: Int32Array
    rollout_logprobs: Float32Array
    text: str
    finish_reason: str
    policy_versions: tuple[VersionSpan, ...]
    engine: int
    seconds: float
    token_mask: Mask | None = None
    support: Support | None = None
    experts: Experts | None = None

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled; this is the response length for all statistics and weights."""
        return len(self.token_ids) if self.token_mask is None else int(self.token_mask.sum())

    @property
    def num_turns(self) -> int:
        """Number of runs of sampled tokens, separated by inserted ones."""
        mask = self.token_mask
        return 1 if mask is None else int(mask[:1].sum() + (mask[1:] & ~mask[:-1]).sum())

    @property
    def sampled_logprobs(self) -> Float32Array:
        """Log-probabilities of the sampled tokens, [S]."""
        return self.rollout_logprobs if self.token_mask is None else self.rollout_logprobs[self.token_mask]

    @property
    def sampled_support(self) -> Support | None:
        """Support at the sampled tokens, S positions."""
        return self.support if self.support is None or self.token_mask is None else self.support.where(self.token_mask)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def aborted(self) -> bool:
        """Whether the response was aborted on request, or because its engine ended."""
        return self.finish_reason == "abort"

    @property
    def failed(self) -> bool:
        """Whether the rollout function failed, so that there is nothing to score."""
        return self.finish_reason == "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Score of one response. Made by `workers.reward`, consumed by the buffer and `dapo.advantage`.

    accuracy: 0..1, NaN = unscorable; the only number that the buffer's filter uses. reward: input of the advantage: the
    weighted sum of `parts` (reward by name, with the overlong penalty). metrics: other numbers of a reward function, as
    LABEL/KEY. prediction: the extracted answer, as the function returned it. failure: "" for a verdict; "cpu" or
    "memory", the limit that made the response wrong; or why it is unscorable: "error", "wall", "crash", "remote" (a
    server did not answer an async function), "away" (no server was available), "model" (no verdict of the reward
    model), "kl" (log-probabilities are not finite) or "rollout" (its rollout function failed).
    """

    accuracy: float
    reward: float
    parts: dict[str, float]
    metrics: dict[str, float]
    prediction: str
    failure: str


def unscorable(failure: str) -> Score:
    return Score(accuracy=math.nan, reward=math.nan, parts={}, metrics={}, prediction="", failure=failure)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All n responses to one draw with their scores. Made by `dapo.sampling.stream`, consumed by the buffer and
    `dapo.algorithm.batch`."""

    draw: Draw
    responses: tuple[Response, ...]
    scores: tuple[Score, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(response.num_sampled for response in self.responses)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def accuracies(self) -> list[float]:
        """Accuracies of the scorable responses."""
        return [score.accuracy for score in self.scores if not math.isnan(score.accuracy)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A group that was aborted, or no longer needed when its responses had ended. Made by `dapo.sampling.stream`.
    lengths: tokens generated so far of each response."""

    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What a step trains on. Made by `OversamplingBuffer.close`, consumed by the trainer.

    groups: those to train on. drawn: all groups that the step used up, trained on or dropped, in draw order. fates: of
    each of them, "trained" or why it is dropped. outcomes: of each for the run's filter, "mixed" or why not. returned:
    draws, running or finished, that are returned to the stream, which aborts those still running; why_returned: the
    reason for all. unfinished: returned draws with missing responses. lost: groups of returned draws, as far as
    generated; the stream adds the unfinished ones. lost_tokens: of all returned draws.
    """

    drawn: tuple[Group, ...]
    groups: tuple[Group, ...]
    fates: tuple[str, ...]
    outcomes: tuple[str, ...]
    returned: tuple[int, ...]
    why_returned: str
    unfinished: frozenset[int]
    lost: tuple[Group | Cut, ...] = ()
    lost_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSequence:
    """One prompt and response as the actor trains on it. Made by `dapo.algorithm.batch`, consumed by `workers.actor`.

    token_ids: [P + R]. token_mask: [R], true at the S response tokens that the policy sampled; None: all, S = R. The
    others are only context, never predicted, and have no further values here. rollout_logprobs: [S]. advantage: one
    number for the whole response. token_weight: weight of each sampled token in the loss of its mini-batch
    (`dapo.loss.token_weights`). staleness: [S], updates between the policy that sampled a token (with
    `weight_sync.keep_kv_cache` that of its response's first span) and the one that the update starts from. support: S
    positions; in a run all sequences have it or none. prompt_experts: [P - 1, layers, k], equal in all responses to a
    prompt; experts: [R, layers, k], of the last prompt token and all response tokens but the last. None: the actors
    choose experts themselves.
    """

    token_ids: Int32Array
    num_prompt_tokens: int
    rollout_logprobs: Float32Array
    advantage: float
    token_weight: float
    staleness: Int32Array
    token_mask: Mask | None = None
    support: Support | None = None
    prompt_experts: Experts | None = None
    experts: Experts | None = None

    @property
    def shared_prompt(self) -> Int32Array:
        """Prompt tokens but the last, [P - 1], computed once for all responses to a prompt. The last one predicts the
        first token of each response."""
        return self.token_ids[: self.num_prompt_tokens - 1]

    @property
    def prompt_key(self) -> bytes:
        """Equal in sequences whose shared prompt can be computed once."""
        experts = (
            b"" if self.prompt_experts is None else blake2b(self.prompt_experts.tobytes(), digest_size=16).digest()
        )
        return self.shared_prompt.tobytes() + experts


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """Input of one `actors.update`. Made by `dapo.algorithm.batch`, consumed by `workers.actor`. version: the policy
    version that the update starts from. minibatches: each use is one optimizer step. order: the mini-batch of each
    optimizer step; each appears `actor.ppo_epochs` times."""

    version: int
    minibatches: tuple[tuple[TrainSequence, ...], ...]
    order: tuple[int, ...]
