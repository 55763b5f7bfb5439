"""Writes the driver's part of a checkpoint: which draws have ended, and the groups that were accepted and not trained
on.

In and out: `DriverState` as JSON; groups as Parquet, one row per response, so that a continued run does not generate
them again. Prompts are not written but found again by their draw.
"""

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
class DriverState:
    """Holds what the driver knows besides the groups. Made by the trainer at the end of a step, consumed by it on
    resuming.

    version: completed updates. buffer: `dapo.sampling.buffer.OversamplingBuffer.state()`.
    """

    version: int
    buffer: BufferState

    def write(self, directory: Path) -> None:
        """Writes `driver.json`."""
        (directory / DRIVER_STATE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "DriverState":
        """Reads `driver.json`. Raises ValueError when it is missing or holds anything else."""
        path = directory / DRIVER_STATE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls(version=int(values["version"]), buffer=BufferState.parse(values["buffer"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} is no state of the driver ({error!r}); remove this checkpoint's directory to continue from "
                "the one before it"
            ) from error


def write_groups(directory: Path, groups: Sequence[tuple[Group, int]]) -> None:
    """Writes groups, each with the policy version at its start."""
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
    # Token arrays barely compress, and a step of 512 x 16 responses of 5k tokens must not take minutes.
    pq.write_table(pa.table(arrays, schema=_SCHEMA), directory / FILE, compression="none", use_dictionary=False)


def read_groups(directory: Path, draw: Callable[[int], Draw]) -> list[tuple[Group, int]]:
    """Returns what `write_groups` wrote, in its order. draw: the stream's, by index. Without a file, nothing."""
    path = directory / FILE
    if not path.is_file():
        return []
    table = pq.read_table(path, schema=_SCHEMA)
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
