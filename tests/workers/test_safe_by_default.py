"""Files of models are data, and what workers are started with holds nobody's secret."""

from pathlib import Path

import pytest
import yaml

from dapo.config.compose import compose
from dapo.ground.redact import is_secret
from dapo.workers.engines.arguments import engine_args
from dapo.workers.placement import Placement

ROOT = Path(__file__).resolve().parents[2]
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY")


def test_no_experiment_trusts_the_code_of_a_model() -> None:
    texts = "".join(path.read_text() for path in (ROOT / "config" / "experiment").rglob("*.yaml"))
    assert texts and "trust_remote_code" not in texts and "load_format" not in texts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_models_are_data(device: str) -> None:
    cfg = compose([], "dapo_tiny")
    assert cfg.model.trust_remote_code is False and cfg.reward.model.trust_remote_code is False
    args = engine_args(cfg, device)
    assert args["trust_remote_code"] is False and args["load_format"] == "safetensors"
    cfg.rollout.vllm["load_format"] = "dummy"
    assert engine_args(cfg, device)["load_format"] == "dummy", "a person's own word counts"


def test_neither_workers_nor_jobs_are_told_a_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps a `runtime_env` and shows it to whoever may ask."""
    for name in SECRETS:
        monkeypatch.setenv(name, f"s3cr3t of {name}")
    cfg = compose([], "dapo_tiny")
    placement = Placement(cfg, "cpu")
    options = [*placement.rollout(), *placement.actors(), *placement.reward_model(), placement.rewards()]
    names = {name for each in options for name in each["runtime_env"]["env_vars"]}
    assert "OMP_NUM_THREADS" in names and "s3cr3t" not in repr(options)
    job = yaml.safe_load((ROOT / "launch" / "runtime_env.yaml").read_text())["env_vars"]
    assert job and [name for name in {*names, *job} if is_secret(name)] == []
