"""Scored groups on disk: what a stopped run had accepted, so that it is not generated again (DESIGN section 9).

In and out: groups, one Parquet row per response; prompts are not written but found again by their draw.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dapo.types import Draw, Group, Response, Score, VersionSpan

FILE = "groups.parquet"
_SCHEMA = pa.schema(
    {
        "draw": pa.int64(),
        "started": pa.int64(),  # policy version when the draw started
        "token_ids": pa.list_(pa.int32()),
        "rollout_logprobs": pa.list_(pa.float32()),
        "text": pa.string(),
        "finish_reason": pa.string(),
        "policy_versions": pa.string(),  # JSON
        "seconds": pa.float64(),
        "score": pa.string(),  # JSON
    }
)


def write_groups(directory: Path, groups: Iterable[tuple[Group, int]]) -> None:
    """groups: each with the policy version at its start."""
    rows = [
        {
            "draw": group.draw.index,
            "started": started,
            "token_ids": response.token_ids,
            "rollout_logprobs": response.rollout_logprobs,
            "text": response.text,
            "finish_reason": response.finish_reason,
            "policy_versions": json.dumps([asdict(span) for span in response.policy_versions]),
            "seconds": response.seconds,
            "score": json.dumps(asdict(score)),
        }
        for group, started in groups
        for response, score in zip(group.responses, group.scores, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), directory / FILE)


def read_groups(directory: Path, draw: Callable[[int], Draw]) -> list[tuple[Group, int]]:
    """What `write_groups` wrote, in its order. draw: the stream's, by index. Without a file, nothing."""
    path = directory / FILE
    if not path.is_file():
        return []
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in pq.read_table(path, schema=_SCHEMA).to_pylist():
        found.setdefault((row["draw"], row["started"]), []).append(row)
    return [
        (
            Group(
                draw=draw(index),
                responses=tuple(_response(row) for row in rows),
                scores=tuple(Score(**json.loads(row["score"])) for row in rows),
            ),
            started,
        )
        for (index, started), rows in found.items()
    ]


def _response(row: dict[str, Any]) -> Response:
    return Response(
        token_ids=np.array(row["token_ids"], dtype=np.int32),
        rollout_logprobs=np.array(row["rollout_logprobs"], dtype=np.float32),
        text=row["text"],
        finish_reason=row["finish_reason"],
        policy_versions=tuple(VersionSpan(**span) for span in json.loads(row["policy_versions"])),
        seconds=row["seconds"],
    )
