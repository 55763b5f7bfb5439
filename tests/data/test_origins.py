"""What a run reads is recorded by commit, or by size and date; a change is told."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from dapo.config.compose import compose
from dapo.data.origins import UNKNOWN, origin, origins
from dapo.state.inputs import INPUTS
from dapo.state.run_dir import ABOUT, claim_output_dir
from tests.support.state.claims import save

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache with a commit of one model."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    refs = tmp_path / "cache" / "models--owner--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    return refs / "main"


def test_of_the_hub_the_commit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    assert origin("owner/name", "model") == f"owner/name@{COMMIT}"
    asked: list[tuple[str, str]] = []

    class Api:
        def repo_info(self, name: str, *, repo_type: str, timeout: float) -> object:
            asked.append((name, repo_type))
            if name == "owner/gone":
                raise ConnectionError("offline")
            return type("Info", (), {"sha": COMMIT[::-1]})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert origin("owner/rows:train", "dataset") == f"owner/rows@{COMMIT[::-1]}:train"
    assert origin("owner/rows:main:train", "dataset") == f"owner/rows@{COMMIT[::-1]}:main:train"
    assert origin("owner/gone", "model") == f"owner/gone@{UNKNOWN}"
    assert asked == [("owner/rows", "dataset"), ("owner/rows", "dataset"), ("owner/gone", "model")]


def test_of_a_disk_size_and_date(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    os.utime(tmp_path / "a", (0, 86400))
    assert origin(str(tmp_path / "a"), "dataset") == f"{tmp_path / 'a'} (5 bytes, 1970-01-02 00:00:00 UTC)"
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b").write_bytes(b"1" * 2000)
    os.utime(tmp_path / "more" / "b", (0, 3))
    part = f"{tmp_path / 'more'}:main:test"
    assert origin(part, "dataset") == f"{part} (1 files, 2,000 bytes, 1970-01-01 00:00:03 UTC)"
    assert origin(str(tmp_path), "model") == f"{tmp_path} (2 files, 2,005 bytes, 1970-01-02 00:00:00 UTC)"


def test_every_input_is_recorded_and_a_change_told(cache: Path, tmp_path: Path) -> None:
    others = ("reward.model.path=owner/name", "data.val_files={sums: pkg://dapo.tiny/data/val.parquet}")
    cfg = compose([f"trainer.output_dir={tmp_path / 'run'}", *others], "dapo_tiny")
    found = origins(cfg)
    assert [*found] == ["model.path", "reward.model.path", "data.train_files[0]", "data.val_files.sums[0]"]
    with claim_output_dir(cfg.trainer.output_dir, "auto", asdict(cfg)) as run:
        assert run.record_inputs(found) == []
        save(run, 1)
    kept = run.checkpoints / "step_000001" / ABOUT / INPUTS
    assert json.loads(kept.read_text()) == json.loads((run.path / INPUTS).read_text()) == found
    cache.write_text("f" * 40)
    with claim_output_dir(cfg.trainer.output_dir, "auto", asdict(cfg)) as run:
        told = run.record_inputs(origins(cfg))
    assert told == [f"`reward.model.path` was owner/name@{COMMIT}, and is owner/name@{'f' * 40}"]
