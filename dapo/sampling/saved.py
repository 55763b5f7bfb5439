"""Writes the driver's part of a checkpoint: which draws have ended, what is still to be reported, and the groups that
were accepted and not trained on.

In and out: `DriverState` as JSON; groups as Parquet, one row per response, so that a continued run does not generate
them again; one group as Arrow bytes, for the journal. Prompts are not written but found again by their draw.
"""

import io
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dapo.sampling.draws import BufferState
from dapo.types import Draw, Group, Response, Score, VersionSpan

DRIVER_STATE = "driver.json"
FILE = "groups.parquet"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Holds what a run still owes for its policy. evaluate: the evaluation of this version is not done. lines: of
    metrics that are not in `metrics.jsonl` yet (`dapo.report.log.MetricsLogger.unwritten`)."""

    evaluate: bool = False
    lines: tuple[str, ...] = ()

    @classmethod
    def parse(cls, values: Any) -> "Due":
        """Returns what JSON holds. Raises TypeError or ValueError where it holds anything else."""
        due = cls(evaluate=values["evaluate"], lines=tuple(values["lines"]))
        if type(due.evaluate) is not bool or not all(type(line) is str for line in due.lines):
            raise ValueError(f"no evaluation and lines: {values}")
        return due


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverState:
    """Holds what the driver knows besides the groups. Made by the trainer at the end of a step, consumed by it on
    resuming.

    version: completed updates. buffer: `dapo.sampling.buffer.OversamplingBuffer.state()`.
    """

    version: int
    buffer: BufferState
    due: Due = Due()

    def write(self, directory: Path) -> None:
        """Writes `driver.json`."""
        (directory / DRIVER_STATE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "DriverState":
        """Reads `driver.json`. Raises ValueError when it is missing or holds anything else."""
        path = directory / DRIVER_STATE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            buffer, due = BufferState.parse(values["buffer"]), Due.parse(values["due"])
            return cls(version=int(values["version"]), buffer=buffer, due=due)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} is no state of the driver ({error!r}); remove this checkpoint's directory to continue from "
                "the one before it"
            ) from error


def write_groups(directory: Path, groups: Sequence[tuple[Group, int]]) -> None:
    """Writes groups, each with the policy version at its start."""
    # Token arrays barely compress, and a step of 512 x 16 responses of 5k tokens must not take minutes.
    pq.write_table(_table(groups), directory / FILE, compression="none", use_dictionary=False)


def read_groups(directory: Path, draw: Callable[[int], Draw]) -> list[tuple[Group, int]]:
    """Returns what `write_groups` wrote, in its order. draw: the stream's, by index. Without a file, nothing."""
    path = directory / FILE
    return _groups(pq.read_table(path, schema=_SCHEMA), draw) if path.is_file() else []


def encode_group(group: Group, started: int) -> bytes:
    """Returns a group with the policy version at its start as an Arrow stream: small, and decoded without a copy."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, _SCHEMA) as writer:
        writer.write_table(_table([(group, started)]))
    return sink.getvalue()


def decode_group(data: bytes, draw: Callable[[int], Draw]) -> tuple[Group, int]:
    """Returns what `encode_group` was given. Raises ValueError for anything else."""
    try:
        with pa.ipc.open_stream(data) as reader:
            table = reader.read_all()
        if table.schema != _SCHEMA:
            raise ValueError(f"columns {table.schema.names}")
        (found,) = _groups(table, draw)
    except (pa.ArrowException, OSError, KeyError, TypeError) as error:
        raise ValueError(f"no group: {error}") from error
    return found


def _table(groups: Sequence[tuple[Group, int]]) -> pa.Table:
    """Returns one row per response."""
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
        [json.dumps([asdict(span) for span in response.policy_versions]) for response in responses],
        [json.dumps(asdict(score)) for _, _, _, score in rows],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.table(arrays, schema=_SCHEMA)


def _groups(table: pa.Table, draw: Callable[[int], Draw]) -> list[tuple[Group, int]]:
    """Returns the groups of a `_table`, in its order."""
    token_ids, logprobs = _arrays(table, "token_ids"), _arrays(table, "rollout_logprobs")
    rest = table.drop_columns(["token_ids", "rollout_logprobs"]).to_pylist()
    found: dict[tuple[int, int], tuple[list[Response], list[Score]]] = {}
    for row, ids, own in zip(rest, token_ids, logprobs, strict=True):
        responses, scores = found.setdefault((row["draw"], row["started"]), ([], []))
        spans = tuple(VersionSpan(**span) for span in json.loads(row["policy_versions"]))
        responses.append(
            Response(
                token_ids=ids,
                rollout_logprobs=own,
                text=row["text"],
                finish_reason=row["finish_reason"],
                policy_versions=spans,
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
    lists = [chunk for chunk in table.column(name).chunks]
    return [
        values[start:end]
        for chunk in lists
        for values in [chunk.values.to_numpy()]
        for start, end in itertools.pairwise(chunk.offsets.to_numpy())
    ]
