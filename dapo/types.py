"""Defines the records that flow through a step, in the order in which they are made.

Every record is frozen; a later stage has a later type. Token arrays are numpy, because a step of 512 x 16 responses
pickles several times faster as arrays than as lists.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
Mask = NDArray[np.bool_]
Messages = tuple[tuple[str, str], ...]  # (role, content) of each message


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Holds one distinct problem. Made by `dapo.data`, consumed by the stream and the reward functions.

    id: position among the distinct prompts kept after filtering.
    source: `data_source` of the row, handed to the reward function.
    messages: the conversation before the policy's chat template; a reward model has a template of its own.
    text: the prompt after the chat template. token_ids: [P], what the engine sees.
    entry: name of the entry of `data.sources` that the row came with; "" without entries.
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
    """Holds one set of problems that are not trained on. Made by `dapo.data.sources`, consumed by `dapo.evaluate`.

    name: in `data.val_files`; "" for the set of a plain list. samples: how many answers each prompt gets.
    """

    name: str
    prompts: tuple[Prompt, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Holds one visit of the stream to a prompt. Made by `dapo.data`; `index` counts visits from 0 over the whole run
    (in an evaluation it is the prompt's id)."""

    index: int
    prompt: Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Says how the engine samples one group. Made by `dapo.sampling.stream.sampling_of`, consumed by `workers.rollout`,
    which is also given a seed per response.

    n: responses per prompt. max_tokens: cap of a response. stop: strings that end it, as its last characters. logprobs:
    whether the tokens' log-probabilities are wanted, as for training; they take a share of the engine's time.
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop: tuple[str, ...] = ()
    logprobs: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Says that tokens [start, end) of a response were sampled by policy `version` (number of completed updates)."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """Holds one sampled answer. Made by `workers.rollout`, consumed by the reward workers and `dapo.batch`.

    token_ids: [R], the end-of-text token included. rollout_logprobs: [R], natural log, of the sampling policy; NaN
    without `Sampling.logprobs`.
    finish_reason: the engine's: "stop", "length" when it ran into the cap, "abort" when it was cut off; "error" where
    `rollout.function` failed.
    engine: number of the one that ended it. seconds: from the request to the last token, waits in an engine included,
    the time in which it was put down not. Of a response that was read from a checkpoint or journal they are -1 and NaN:
    another fleet made it. text: empty where it was cut off. token_mask: [R], true where the policy sampled the token;
    the others were given to it between turns (a tool's answer, feedback), their log-probability means nothing, and no
    span names them. None: it sampled them all.
    """

    token_ids: Int32Array
    rollout_logprobs: Float32Array
    text: str
    finish_reason: str
    policy_versions: tuple[VersionSpan, ...]
    engine: int
    seconds: float
    token_mask: Mask | None = None

    @property
    def num_sampled(self) -> int:
        """Counts the tokens that the policy sampled: the length of the response wherever lengths count."""
        return len(self.token_ids) if self.token_mask is None else int(self.token_mask.sum())

    @property
    def num_turns(self) -> int:
        """Counts the runs of sampled tokens; between two of them are others."""
        mask = self.token_mask
        return 1 if mask is None else int(mask[:1].sum() + (mask[1:] & ~mask[:-1]).sum())

    @property
    def sampled_logprobs(self) -> Float32Array:
        """Returns the log-probabilities of the sampled tokens, [S]."""
        return self.rollout_logprobs if self.token_mask is None else self.rollout_logprobs[self.token_mask]

    @property
    def truncated(self) -> bool:
        """Returns whether the response ran into the cap."""
        return self.finish_reason == "length"

    @property
    def aborted(self) -> bool:
        """Returns whether the engine was asked to end the response, or ended."""
        return self.finish_reason == "abort"

    @property
    def failed(self) -> bool:
        """Returns whether the rollout function failed, so that there is nothing to score."""
        return self.finish_reason == "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Holds the score of one response. Made by `workers.reward`, consumed by the buffer and `dapo.advantage`.

    accuracy: 0..1, NaN = unscorable; the only number that the buffer's filter looks at.
    reward: what the advantage is made of: the weighted sum of `parts` (reward by name, the overlong penalty included).
    metrics: other numbers that a reward function gave, as LABEL/KEY. prediction: the extracted answer, as it gave it.
    failure: "" for a verdict of the functions; "cpu" or "memory", the limit that made the response wrong; "error",
    "wall", "crash", "remote" (a server did not answer an async function), "away" (none was there), "model" (the reward
    model has none), "kl" (log-probabilities are not finite) or "rollout" (its rollout function failed), why it is
    unscorable.
    """

    accuracy: float
    reward: float
    parts: dict[str, float]
    metrics: dict[str, float]
    prediction: str
    failure: str


def unscorable(failure: str) -> Score:
    """Returns a score of NaN, with the reason."""
    return Score(accuracy=math.nan, reward=math.nan, parts={}, metrics={}, prediction="", failure=failure)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Holds all n responses to one draw with their scores. Made by `dapo.sampling.stream`, consumed by the buffer and
    `dapo.batch`."""

    draw: Draw
    responses: tuple[Response, ...]
    scores: tuple[Score, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Counts the sampled tokens of each response."""
        return tuple(response.num_sampled for response in self.responses)

    @property
    def num_tokens(self) -> int:
        """Counts the generated tokens of the group."""
        return sum(self.lengths)

    @property
    def accuracies(self) -> list[float]:
        """Returns the accuracies of the scorable responses."""
        return [score.accuracy for score in self.scores if not math.isnan(score.accuracy)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Holds a group that was cut off, or was no longer wanted when its responses had ended. Made by
    `dapo.sampling.stream`. lengths: tokens of each response, as far as it was generated."""

    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Counts the generated tokens of the group."""
        return sum(self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """Holds what a step trains on. Made by `OversamplingBuffer.close`, consumed by the trainer.

    groups: those to train on. drawn: all groups that the step used up, trained on or dropped, in draw order. fates: how
    each of them ends, "trained" or why it is dropped. outcomes: what each is to the run's filter, "mixed" or why not.
    returned: draws in flight or finished that go back to the stream, which ends those that still run; why_returned: the
    one reason.
    unfinished: those of them whose responses were not all there. lost: groups of returned draws, as far as they were
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
    """Holds one prompt and response as the actor trains on it. Made by `dapo.batch`, consumed by `workers.actor`.

    token_ids: [P + R]. token_mask: [R], true at the S response tokens that the policy sampled; None: at all, S = R.
    The others are read and never predicted: there is nothing else about them here. rollout_logprobs: [S]. advantage:
    one number for the whole response. token_weight: weight of each sampled token in the loss of its mini-batch
    (`dapo.loss.token_weights`). staleness: [S], updates between the policy that sampled a token and the one that the
    update starts from.
    """

    token_ids: Int32Array
    num_prompt_tokens: int
    rollout_logprobs: Float32Array
    advantage: float
    token_weight: float
    staleness: Int32Array
    token_mask: Mask | None = None

    @property
    def shared_prompt(self) -> Int32Array:
        """Returns what need be computed only once for all responses to a prompt: its tokens but the last, [P - 1], from
        which the first token of each response is predicted."""
        return self.token_ids[: self.num_prompt_tokens - 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """Holds what one call of `actors.update` trains on. Made by `dapo.batch`, consumed by `workers.actor`.

    version: the policy version that the update starts from. minibatches: one optimizer step each time they are taken.
    order: the mini-batch of each optimizer step; `actor.ppo_epochs` times all of them.
    """

    version: int
    minibatches: tuple[tuple[TrainSequence, ...], ...]
    order: tuple[int, ...]
