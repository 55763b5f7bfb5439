"""What vLLM's server is given, and where judges are placed: without vLLM and Ray."""

import pytest

from dapo.config.reward import JudgeEngineConfig
from dapo.config.schema import Config
from workers.judge import server_arguments
from workers.placing.asked import count_gpus, pools


def test_arguments_of_the_server() -> None:
    vllm = {"max_model_len": 512, "enforce_eager": False, "override_generation_config": {"top_k": 1}, "seed": None}
    config = JudgeEngineConfig(path="owner/judge", vllm=vllm)
    assert server_arguments(config, "cpu") == [
        *("--model", "owner/judge"),
        *("--load-format=safetensors", "--no-trust-remote-code", "--dtype=float32", "--no-enforce-eager"),
        *("--max-model-len=512", '--override-generation-config={"top_k": 1}'),
    ]
    assert server_arguments(JudgeEngineConfig(path="j", trust_remote_code=True), "cuda") == [
        *("--model", "j", "--load-format=safetensors", "--trust-remote-code")
    ]


@pytest.mark.parametrize(
    ("device", "settings", "gpus"),
    [
        pytest.param("cuda", {"path": ""}, 0, id="no-judge"),
        pytest.param("cuda", {"num_engines": 2, "vllm": {"tensor_parallel_size": 4}}, 8, id="gpus-of-their-own"),
        pytest.param("cuda", {"device": "cpu"}, 0, id="beside-gpus-on-the-cpu"),
        pytest.param("cpu", {}, 0, id="follows-the-trainer"),
    ],
)
def test_gpus_of_judges_are_counted(device: str, settings: dict[str, object], gpus: int) -> None:
    cfg = Config()
    without = count_gpus(cfg, device)
    cfg.reward.judge.engine = JudgeEngineConfig(**{"path": "judge", **settings})  # type: ignore[arg-type]
    assert count_gpus(cfg, device) == without + gpus
    assert [pool.gpus for pool in pools(cfg, device) if pool.name == "judges"] == ([gpus // 2] if gpus else [])
