"""What vLLM's scheduler is made of, without an engine."""

from typing import Any

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from dapo.config.paths import resolve_path

BLOCK = 16  # tokens


def needs(*, ahead: bool, blocks: int, caching: bool) -> dict[str, Any]:
    """ahead: one step is scheduled while the one before is computed. Set `vllm_environment` before."""
    args = AsyncEngineArgs(
        model=resolve_path("pkg://dapo.tiny/base"), dtype="float32", max_model_len=64, enable_prefix_caching=caching
    )
    config = args.create_engine_config()
    config.scheduler_config.async_scheduling = ahead
    config.cache_config.num_gpu_blocks = blocks
    layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    return {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], layer)]),
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": BLOCK,
        "hash_block_size": BLOCK,
    }
