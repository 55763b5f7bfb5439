"""Turns groups into rows, one per response, and back. Checkpoints, batches and refused steps are Parquet files; a
record of the journal is one group as Arrow bytes. Prompts are not saved but found again by draw. The column
`token_mask` exists only if a group has one.

The journal has the groups that finished after the checkpoint and whose tokens are all of its policy or older ones: a
resumed run could have generated them itself.
"""

import hashlib
import io
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dapo.sampling.draws import BufferState
from dapo.state.journal import Journal
from dapo.types import Draw, Group, Prompt, Response, Score, VersionSpan

FILE = "groups.parquet"
PROMPT_BYTES = 8  # digest of the prompt before the group in a record of the journal
TOGETHER = 16  # groups per write: their columns are in memory twice, and block other threads
_FIELDS = {kind: [field.name for field in fields(kind)] for kind in (VersionSpan, Score)}
_SCHEMA = pa.schema(
    {
        "draw": pa.int64(),
        "started": pa.int64(),  # policy version when the draw started
        "token_ids": pa.large_list(pa.int32()),
        "rollout_logprobs": pa.large_list(pa.float32()),
        "text": pa.large_string(),
        "finish_reason": pa.string(),
        "policy_versions": pa.string(),  # JSON
        "score": pa.string(),  # JSON
    }
)
_MASKED = _SCHEMA.append(pa.field("token_mask", pa.large_binary()))  # a byte per token; null: all were sampled


def write_groups(directory: Path, groups: Sequence[tuple[Group, int]]) -> None:
    # Token arrays barely compress, and a step of 512 x 16 responses of 5k tokens must not take minutes.
    schema = _schema_of(groups)
    with pq.ParquetWriter(directory / FILE, schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, len(groups), TOGETHER):
            writer.write_table(_table(groups[start : start + TOGETHER], schema))


def read_groups(directory: Path, draw: Callable[[int], Draw]) -> list[tuple[Group, int]]:
    """Returns what `write_groups` wrote, in its order; nothing without a file. draw: of an index."""
    path = directory / FILE
    return _groups(pq.read_table(path, schema=_MASKED), draw) if path.is_file() else []


def oldest_policy(directory: Path, default: int) -> int:
    """Returns the earliest policy version that sampled a token of the groups; `default` without tokens or file."""
    path = directory / FILE
    if not path.is_file():
        return default
    spans = pq.read_table(path, columns=["policy_versions"])["policy_versions"].to_pylist()
    return min((span["version"] for text in spans for span in json.loads(text)), default=default)


def encode_group(group: Group, started: int) -> bytes:
    """Returns a group with the policy version at its start as an Arrow stream: small, and decoded without a copy."""
    sink = io.BytesIO()
    schema = _schema_of([(group, started)])
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(_table([(group, started)], schema))
    return sink.getvalue()


def decode_group(data: bytes, draw: Callable[[int], Draw]) -> tuple[Group, int]:
    """Inverse of `encode_group`. Raises ValueError for anything else."""
    try:
        with pa.ipc.open_stream(data) as reader:
            table = reader.read_all()
        if table.schema not in (_SCHEMA, _MASKED):
            raise ValueError(f"columns {table.schema.names}")
        (found,) = _groups(table, draw)
    except (pa.ArrowException, OSError, KeyError, TypeError) as error:
        raise ValueError(f"no group: {error}") from error
    return found


def note(journal: Journal, group: Group, started: int) -> None:
    """Appends a buffered group, with the policy version at its start. A group with tokens of a policy after the last
    checkpoint is skipped: a run resumed from there makes another such policy, and the next checkpoint has the group, or
    it is trained on by then."""
    if max(started, newest_policy(group)) <= journal.version:
        size = sum(each.token_ids.nbytes + each.rollout_logprobs.nbytes + len(each.text) for each in group.responses)
        journal.append(lambda: _prompt_digest(group.draw.prompt) + encode_group(group, started), size)


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
            group, started = decode_group(record[PROMPT_BYTES:], draw)
        except ValueError:
            continue
        index = group.draw.index
        same_prompt = _prompt_digest(group.draw.prompt) == record[:PROMPT_BYTES]
        fits = same_prompt and state.awaits(index, held) and max(started, newest_policy(group)) <= version
        if fits and not void(group):
            found[index] = group, started, record  # the last one, if a draw was started again
    in_order = [found[index] for index in sorted(found)]
    journal.restart(version, [record for _, _, record in in_order])
    return [(group, started) for group, started, _ in in_order]


def newest_policy(group: Group) -> int:
    """Returns the latest policy version that sampled a token of the group; -1 without tokens."""
    return max((span.version for response in group.responses for span in response.policy_versions), default=-1)


def _prompt_digest(prompt: Prompt) -> bytes:
    return hashlib.blake2b(prompt.token_ids.tobytes(), digest_size=PROMPT_BYTES).digest()


def _schema_of(groups: Sequence[tuple[Group, int]]) -> pa.Schema:
    masked = any(response.token_mask is not None for group, _ in groups for response in group.responses)
    return _MASKED if masked else _SCHEMA


def _table(groups: Sequence[tuple[Group, int]], schema: pa.Schema) -> pa.Table:
    rows = [
        (group.draw.index, started, response, score)
        for group, started in groups
        for response, score in zip(group.responses, group.scores, strict=True)
    ]
    responses = [response for _, _, response, _ in rows]
    columns = [
        [index for index, _, _, _ in rows],
        [started for _, started, _, _ in rows],
        _column([response.token_ids for response in responses], np.dtype(np.int32)),
        _column([response.rollout_logprobs for response in responses], np.dtype(np.float32)),
        [response.text for response in responses],
        [response.finish_reason for response in responses],
        [json.dumps([_values(span) for span in response.policy_versions]) for response in responses],
        [json.dumps(_values(score)) for _, _, _, score in rows],
        [None if (mask := response.token_mask) is None else mask.tobytes() for response in responses],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=False)]
    return pa.table(arrays, schema=schema)


def _values(one: VersionSpan | Score) -> dict[str, Any]:
    """Like `dataclasses.asdict`, without its copies, which took most of the journal's time."""
    return {name: getattr(one, name) for name in _FIELDS[type(one)]}


def _groups(table: pa.Table, draw: Callable[[int], Draw]) -> list[tuple[Group, int]]:
    token_ids, logprobs = _arrays(table, "token_ids"), _arrays(table, "rollout_logprobs")
    rest = table.drop_columns(["token_ids", "rollout_logprobs"]).to_pylist()
    found: dict[tuple[int, int], tuple[list[Response], list[Score]]] = {}
    for row, ids, own in zip(rest, token_ids, logprobs, strict=True):
        responses, scores = found.setdefault((row["draw"], row["started"]), ([], []))
        spans = tuple(VersionSpan(**span) for span in json.loads(row["policy_versions"]))
        mask = row.get("token_mask")
        responses.append(
            Response(
                token_ids=ids,
                rollout_logprobs=own,
                text=row["text"],
                finish_reason=row["finish_reason"],
                policy_versions=spans,
                engine=-1,
                seconds=math.nan,
                token_mask=None if mask is None else np.frombuffer(mask, dtype=np.bool_),
            )
        )
        scores.append(Score(**json.loads(row["score"])))
    return [
        (Group(draw=draw(index), responses=tuple(responses), scores=tuple(scores)), started)
        for (index, started), (responses, scores) in found.items()
    ]


def _column(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> pa.LargeListArray:
    """Returns one list per array, without a Python number per token."""
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays], dtype=np.int64)])
    values = np.concatenate([np.zeros(0, dtype), *arrays])
    return pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64)), pa.array(values))


def _arrays(table: pa.Table, name: str) -> list[NDArray[Any]]:
    return [
        values[start:end]
        for chunk in table.column(name).chunks
        for values in [chunk.values.to_numpy()]
        for start, end in itertools.pairwise(chunk.offsets.to_numpy())
    ]
