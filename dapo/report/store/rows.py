"""Converts groups into rows, in the order of the tables' columns."""

import json
import math
from collections.abc import Iterator, Mapping

import numpy as np

from dapo.types import Group, Prompt, Response, Score

PREDICTION_BYTES = 1024
CUT = "\n[... {} bytes ...]\n"


def keeps_text(number: int, fraction: float) -> bool:
    """Whether the texts of draw `number` are in the kept fraction, which is spread evenly."""
    return math.floor((number + 1) * fraction) > math.floor(number * fraction)


def prompt_row(split: str, prompt: Prompt) -> tuple[object, ...]:
    return split, prompt.id, clean(prompt.source), clean(prompt.text), clean(prompt.ground_truth)


def group_row(step: int, group: Group, fate: str) -> tuple[object, ...]:
    accuracies = group.accuracies
    rewards = [score.reward for score in group.scores if math.isfinite(score.reward)]
    versions = [span.version for response in group.responses for span in response.policy_versions]
    return (
        group.draw.index,
        step,
        group.draw.prompt.id,
        fate,
        len(group.responses),
        len(accuracies),
        float(np.mean(accuracies)) if accuracies else None,
        float(np.var(accuracies)) if accuracies else None,
        float(np.mean(rewards)) if rewards else None,
        group.num_tokens,
        max(group.lengths, default=0),
        sum(response.truncated for response in group.responses),
        max(versions, default=None),
    )


def answer_rows(key: tuple[object, ...], group: Group, max_bytes: int) -> Iterator[tuple[object, ...]]:
    """Yields a row per response. key: the columns before the sample's. max_bytes: of each text; 0: no text."""
    for sample, (response, score) in enumerate(zip(group.responses, group.scores, strict=True)):
        yield (*key, sample, *_answer(response, score, max_bytes))


def _answer(response: Response, score: Score, max_bytes: int) -> tuple[object, ...]:
    spans = [(span.version, span.start, span.end) for span in response.policy_versions]
    text = clean(response.text)
    data = text.encode()
    return (
        response.num_sampled,
        response.finish_reason,
        spans[-1][0] if spans else None,
        json.dumps(spans),
        response.engine,
        _finite(response.seconds),
        _finite(score.accuracy),
        _finite(score.reward),
        _numbers(score.parts),
        _numbers(score.metrics),
        clean(score.prediction).encode()[:PREDICTION_BYTES].decode("utf-8", "ignore"),
        score.failure,
        len(data),
        None if max_bytes == 0 else text if len(data) <= max_bytes else _middle_out(data, max_bytes),
    )


def _numbers(values: Mapping[str, float]) -> str:
    return json.dumps({name: _finite(value) for name, value in values.items()})


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def clean(text: str) -> str:
    """Returns text that is valid UTF-8, without NUL, at which SQLite's functions end a text."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{SYMBOL FOR NULL}")


def _middle_out(data: bytes, max_bytes: int) -> str:
    half = max_bytes // 2
    ends = [part.decode("utf-8", "ignore") for part in (data[:half], data[len(data) - half :])]
    return CUT.format(len(data) - 2 * half).join(ends)
