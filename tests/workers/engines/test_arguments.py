"""What engines are started with: what follows from other keys, the needs of a device, and a person's own above both."""

from dapo.config.schema import Config
from workers.engines.arguments import engine_args


def tensor_parallel(size: int) -> Config:
    cfg = Config()
    cfg.rollout.vllm = {"tensor_parallel_size": size}
    return cfg


def test_engine_arguments_of_a_person_win():
    cfg = Config()
    cfg.rollout.vllm |= {"max_num_seqs": 7, "enforce_eager": False}
    args = engine_args(cfg, "cpu")
    assert args["max_num_seqs"] == 7 and args["enforce_eager"] is False
    assert args["enable_chunked_prefill"] is False
    assert args["max_model_len"] == cfg.data.max_prompt_length + cfg.data.max_response_length
    assert "enforce_eager" not in engine_args(Config(), "cuda")


def test_an_engine_of_several_gpus_does_not_take_rays_executor():
    """vLLM's own choice inside a placement group, which ends at "bundle cannot have more than 1 GPU"."""
    assert engine_args(tensor_parallel(4), "cuda")["distributed_executor_backend"] == "mp"
    assert "distributed_executor_backend" not in engine_args(Config(), "cuda")
    cfg = tensor_parallel(4)
    cfg.rollout.vllm["distributed_executor_backend"] = "external"
    assert engine_args(cfg, "cuda")["distributed_executor_backend"] == "external"


def test_only_engines_that_take_turns_on_a_gpu_can_sleep():
    """vLLM refuses the argument on a CPU, where it has no such mode."""
    cfg = Config()
    assert "enable_sleep_mode" not in engine_args(cfg, "cuda")
    cfg.trainer.colocate = "time"
    assert engine_args(cfg, "cuda")["enable_sleep_mode"] is True
    assert "enable_sleep_mode" not in engine_args(cfg, "cpu")
