"""What a run reads is recorded by commit, or by size and date; a change is told."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from dapo.config.compose import compose
from dapo.data.origins import origins
from dapo.state.run_dir import ABOUT, INPUTS, claim_output_dir
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


def test_every_input_is_recorded_and_a_change_told(cache, tmp_path):
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
