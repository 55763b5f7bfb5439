"""Turns groups into tables, one row per response, and back. Groups that wait in a checkpoint, batches that were trained
on and groups that were set aside are Parquet files; a record of the journal is an Arrow stream, which takes less time.

Prompts are found again by their draws; the column `prompt` (messages as JSON) is for people and to detect other data.
"""

import io
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dapo.sampling.draws import BufferState
from dapo.state.journal import Journal
from dapo.types import Draw, Experts, Float32Array, Group, Int32Array, Prompt, Response, Score, Support, VersionSpan

FILE = "groups.parquet"
TOGETHER = 16  # groups per write: their columns are in memory twice, and block other threads
_FIELDS = {kind: [field.name for field in fields(kind)] for kind in (VersionSpan, Score)}
_SCHEMA = pa.schema(
    {
        "draw": pa.int64(),
        "started": pa.int64(),  # policy version when the draw started
        "prompt": pa.string(),  # JSON
        "visit": pa.int64(),  # only with a curriculum (`dapo.data.order.PromptOrder.visits_of`)
        "token_ids": pa.large_list(pa.int32()),
        "rollout_logprobs": pa.large_list(pa.float32()),
        "text": pa.large_string(),
        "finish_reason": pa.string(),
        "policy_versions": pa.string(),  # JSON
        "score": pa.string(),  # JSON
        "token_mask": pa.large_binary(),  # a byte per token; null: all were sampled
        # Of `dapo.types.Support`; empty without it.
        "support_counts": pa.large_list(pa.uint16()),
        "support_ids": pa.large_list(pa.int32()),
        "support_logprobs": pa.large_list(pa.float32()),
        "experts": pa.large_list(pa.uint8()),  # the bytes of `dapo.types.Experts`; empty without it
        "experts_shape": pa.list_(pa.int32()),  # layers, experts per token, bytes of one; null without
    }
)
# Read and written without a Python number per token.
_ARRAYS = ["token_ids", "rollout_logprobs", "support_counts", "support_ids", "support_logprobs", "experts"]
Visits = Mapping[int, int]


_NO_SUPPORT = Support(counts=np.zeros(0, np.uint16), token_ids=np.zeros(0, np.int32))


class OtherPrompt(ValueError):
    """A group answers another prompt than its draw has in this run. Its only argument is the draw."""


def write_groups(file: Path, groups: Sequence[tuple[Group, int]], visits: Visits | None = None) -> None:
    """groups: each with the policy version at its start. visits: of their draws."""
    # Token arrays barely compress, and a step of 512 x 16 responses of 5k tokens must not take minutes.
    with pq.ParquetWriter(file, _SCHEMA, compression="none", use_dictionary=["prompt"]) as writer:
        for start in range(0, len(groups), TOGETHER):
            writer.write_table(_table(groups[start : start + TOGETHER], visits or {}))


def read_groups(
    file: Path,
    draw: Callable[[int], Draw],
    *,
    know: Callable[[Visits], None] = lambda visits: None,
    check: bool = False,
) -> list[tuple[Group, int]]:
    """Returns what `write_groups` wrote, in its order. draw: of an index. know: called with the visits before `draw`.
    check: raise OtherPrompt if a prompt has changed."""
    return _groups(pq.read_table(file, schema=_SCHEMA), draw, know, check)


def _groups(
    table: pa.Table, draw: Callable[[int], Draw], know: Callable[[Visits], None], check: bool
) -> list[tuple[Group, int]]:
    arrays = {name: _arrays(table, name) for name in _ARRAYS}
    rows = table.drop_columns(_ARRAYS).to_pylist()
    know({row["draw"]: row["visit"] for row in rows if row["visit"] is not None})
    found: dict[tuple[int, int], tuple[Draw, list[Response], list[Score]]] = {}
    for row, ids, own, *support, experts in zip(rows, *arrays.values(), strict=True):
        index, started, mask = row["draw"], row["started"], row["token_mask"]
        if (index, started) not in found:
            found[index, started] = draw(index), [], []
        own_draw, responses, scores = found[index, started]
        if check and not responses and row["prompt"] != _messages(own_draw.prompt):
            raise OtherPrompt(index)
        responses.append(
            Response(
                token_ids=ids,
                rollout_logprobs=own,
                text=row["text"],
                finish_reason=row["finish_reason"],
                policy_versions=tuple(VersionSpan(**span) for span in json.loads(row["policy_versions"])),
                engine=-1,
                seconds=math.nan,
                token_mask=None if mask is None else np.frombuffer(mask, dtype=np.bool_),
                support=_support(*support),
                experts=_experts(experts, row["experts_shape"]),
            )
        )
        scores.append(Score(**json.loads(row["score"])))
    return [
        (Group(draw=own_draw, responses=tuple(responses), scores=tuple(scores)), started)
        for (_, started), (own_draw, responses, scores) in found.items()
    ]


def oldest_policy(file: Path, default: int) -> int:
    """Returns the earliest policy version that sampled a token of the groups; `default` without tokens."""
    spans = pq.read_table(file, columns=["policy_versions"])["policy_versions"].to_pylist()
    return min((span["version"] for text in spans for span in json.loads(text)), default=default)


def newest_policy(group: Group) -> int:
    """Returns the latest policy version that sampled a token of the group; -1 without tokens."""
    return max((span.version for response in group.responses for span in response.policy_versions), default=-1)


def note(journal: Journal, group: Group, started: int) -> None:
    """Appends a buffered group, with the policy version at its start. A group with tokens of a policy after the last
    checkpoint is skipped: a run resumed from there makes another such policy, and the next checkpoint has the group, or
    it is trained on by then."""

    def encoded() -> bytes:
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, _SCHEMA) as writer:
            writer.write_table(_table([(group, started)], {}))
        return sink.getvalue()

    if max(started, newest_policy(group)) <= journal.version:
        journal.append(encoded)


def recover(
    journal: Journal,
    state: BufferState,
    held: int,
    draw: Callable[[int], Draw],
    *,
    version: int,
    void: Callable[[Group], bool] = lambda group: False,
) -> list[tuple[Group, int]]:
    """Returns the groups that finished after the checkpoint of policy `version`, in draw order, each with the version
    at its start. Restarts the journal with them. state: of the checkpoint. held: number of its groups. draw: of an
    index. void: whether a group must not be trained on."""
    found: dict[int, tuple[Group, int, bytes]] = {}
    for record in journal.read(version):
        try:
            table = pa.ipc.open_stream(record).read_all()
            ((group, started),) = _groups(table, draw, lambda visits: None, check=True)
        except OtherPrompt:
            continue
        index = group.draw.index
        if state.awaits(index, held) and max(started, newest_policy(group)) <= version and not void(group):
            found[index] = group, started, record  # the last one, if a draw was started again
    in_order = [found[index] for index in sorted(found)]
    journal.restart(version, [record for _, _, record in in_order])
    return [(group, started) for group, started, _ in in_order]


def _messages(prompt: Prompt) -> str:
    return json.dumps(prompt.messages)


def _table(groups: Sequence[tuple[Group, int]], visits: Visits) -> pa.Table:
    rows = [
        (group.draw, started, response, score)
        for group, started in groups
        for response, score in zip(group.responses, group.scores, strict=True)
    ]
    responses = [response for _, _, response, _ in rows]
    supports = [response.support or _NO_SUPPORT for response in responses]
    experts = [response.experts for response in responses]
    columns = [
        [draw.index for draw, _, _, _ in rows],
        [started for _, started, _, _ in rows],
        [_messages(draw.prompt) for draw, _, _, _ in rows],
        [visits.get(draw.index) for draw, _, _, _ in rows],
        _column([response.token_ids for response in responses], np.dtype(np.int32)),
        _column([response.rollout_logprobs for response in responses], np.dtype(np.float32)),
        [response.text for response in responses],
        [response.finish_reason for response in responses],
        [json.dumps([_values(span) for span in response.policy_versions]) for response in responses],
        [json.dumps(_values(score)) for _, _, _, score in rows],
        [None if (mask := response.token_mask) is None else mask.tobytes() for response in responses],
        _column([support.counts for support in supports], np.dtype(np.uint16)),
        _column([support.token_ids for support in supports], np.dtype(np.int32)),
        _column([support.logprobs for support in supports], np.dtype(np.float32)),
        _column([None if rows is None else rows.reshape(-1).view(np.uint8) for rows in experts], np.dtype(np.uint8)),
        [None if rows is None else [*rows.shape[1:], rows.itemsize] for rows in experts],
    ]
    return pa.table([pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)], _SCHEMA)


def _values(one: VersionSpan | Score) -> dict[str, Any]:
    """Like `dataclasses.asdict`, without its copies, which took most of the journal's time."""
    return {name: getattr(one, name) for name in _FIELDS[type(one)]}


def _support(counts: NDArray[np.uint16], token_ids: Int32Array, logprobs: Float32Array) -> Support | None:
    if not len(counts):
        return None
    return Support(counts=counts, token_ids=token_ids, logprobs=logprobs if len(logprobs) else None)


def _experts(content: NDArray[np.uint8], shape: list[int] | None) -> Experts | None:
    if shape is None:
        return None
    layers, per_token, size = shape
    return content.view(f"u{size}").reshape(-1, layers, per_token)


def _column(arrays: Sequence[NDArray[Any] | None], dtype: np.dtype[Any]) -> pa.LargeListArray:
    """Returns one list per array; an empty one for None."""
    found = [np.zeros(0, dtype) if array is None else array for array in arrays]
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in found], dtype=np.int64)])
    values = np.concatenate([np.zeros(0, dtype), *found])
    return pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64)), pa.array(values))


def _arrays(table: pa.Table, name: str) -> list[NDArray[Any]]:
    return [
        values[start:end]
        for chunk in table.column(name).chunks
        for values in [chunk.values.to_numpy()]
        for start, end in itertools.pairwise(chunk.offsets.to_numpy())
    ]
