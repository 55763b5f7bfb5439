"""Checkpoints of somebody else: what they hold is read and never run."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dapo.workers.training.files.state import Planner, Reader


class Command:
    """Runs when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


def saved(directory: Path, **values: Any) -> dict[str, Any]:
    tree = {"model": {"w": torch.arange(3.0)}, "optimizer": {"groups": [{"lr": 0.5, "betas": (0.9, 0.99), "p": ["w"]}]}}
    dcp.save({**tree, **values}, checkpoint_id=str(directory), no_dist=True)
    return tree


def loaded(directory: Path, **values: Any) -> dict[str, Any]:
    tree = {"model": {"w": torch.zeros(3)}, "optimizer": {"groups": [{"lr": 0.0, "betas": (), "p": []}]}, **values}
    dcp.load(tree, storage_reader=Reader(directory), planner=Planner(), no_dist=True)
    return tree


def test_what_dcp_writes_is_read(tmp_path: Path) -> None:
    wanted, found = saved(tmp_path), loaded(tmp_path)
    assert found["optimizer"] == wanted["optimizer"] and torch.equal(found["model"]["w"], wanted["model"]["w"])


@pytest.mark.parametrize("program", ["command", "getattr", "no description"])
def test_metadata_that_names_a_program_is_refused_and_does_not_run(tmp_path: Path, program: str) -> None:
    saved(tmp_path)
    images = {
        "command": pickle.dumps(Command(tmp_path / "made")),
        "getattr": b"cbuiltins\ngetattr\n(ctorch\nSize\nV__class__\ntR.",
        "no description": pickle.dumps([1]),
    }
    (tmp_path / ".metadata").write_bytes(images[program])
    with pytest.raises((pickle.UnpicklingError, CheckpointException), match=r"\.metadata") as error:
        loaded(tmp_path)
    assert "which is no part" in str(error.value) or program == "no description"
    assert not (tmp_path / "made").exists()


def test_a_value_that_is_a_program_is_refused_and_does_not_run(tmp_path: Path) -> None:
    saved(tmp_path, scale=Command(tmp_path / "made"))
    with pytest.raises((pickle.UnpicklingError, CheckpointException), match="weights_only|Weights only"):
        loaded(tmp_path, scale=0)
    assert not (tmp_path / "made").exists()
