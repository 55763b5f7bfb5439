"""Names every part of vLLM that we rely on, and finds out whether the installed vLLM has it.

In: the installed vLLM, which nothing here loads before a name is asked for. Out: vLLM's classes and functions, as in
`from workers.vllm_surface import AsyncLLM`, or one error that lists what is missing or has changed, and who uses it.

Much of it is private to vLLM or young. Another version: workers/README.md. Whoever uses another name adds its row.
"""

import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from workers.contract import Name, broken, find

KNOWN = ">=0.32,<0.34"  # the extras of pyproject.toml say the same
# Loading these takes seconds. The processes that use them have loaded them by themselves; elsewhere they are left out.
SLOW = ("vllm.v1.worker.", "vllm.v1.core.sched.", "vllm.model_executor.models.", "vllm.entrypoints.")


def _engine(name: str, call: str | None = None, *, awaited: bool = True) -> Name:
    return Name(path=f"vllm.v1.engine.async_llm:AsyncLLM.{name}", call=call, awaited=awaited and call is not None)


_WORKER = "vllm_config weight_transfer_engine _weight_update_active model_runner"
_TRANSFER = "vllm.distributed.weight_transfer"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_KEEPER = "vllm.v1.core.kv_cache_manager"
_ARGS = "vllm.engine.arg_utils:AsyncEngineArgs"

# By the file that uses them. Engines start only where those of workers/ are as they should be.
USES: dict[str, tuple[Name, ...]] = {
    "workers/engines/worker.py": (
        Name(
            path=_ARGS,
            call="model= logprobs_mode= worker_extension_cls= weight_transfer_config= disable_log_stats= "
            "scheduler_cls=",
        ),
        Name(path="vllm.config.model:LogprobsMode", holds="processed_logprobs"),
        Name(path="vllm.config.weight_transfer:WeightTransferConfig", call="backend="),
        Name(path="vllm.v1.engine.async_llm:AsyncLLM", has="vllm_config"),
        _engine("from_engine_args", "args stat_loggers=", awaited=False),
        _engine("get_tokenizer", "", awaited=False),
        _engine("generate", "prompt params request_id", awaited=False),  # an iterator
        _engine("abort", "request_ids"),
        _engine("shutdown", "timeout=", awaited=False),
        _engine("collective_rpc", "method kwargs="),
        _engine("sleep", "level"),
        _engine("wake_up", "tags"),
        _engine("pause_generation", "mode= clear_cache="),
        _engine("resume_generation", ""),
        _engine("update_weight_version", "version"),
        _engine("init_weight_transfer_engine", "request"),
        _engine("start_weight_update", ""),
        _engine("update_weights", "request"),
        _engine("finish_weight_update", ""),
        Name(path="vllm.v1.engine:PauseMode", holds="keep"),
        Name(path="vllm.v1.engine.exceptions:EngineDeadError"),
        Name(
            path="vllm.sampling_params:SamplingParams",
            call="temperature= top_p= top_k= max_tokens= seed= logprobs= flat_logprobs= detokenize= output_kind= stop= "
            "include_stop_str_in_output=",
        ),
        Name(path="vllm.sampling_params:RequestOutputKind", has="FINAL_ONLY"),
        Name(path="vllm.outputs:RequestOutput", has="outputs"),
        Name(path="vllm.outputs:CompletionOutput", has="token_ids logprobs finish_reason weight_versions"),
        Name(path="vllm.outputs:WeightVersionSpan", has="version start end"),
        Name(path="vllm.logprobs:FlatLogprobs", has="logprobs"),
        Name(path="vllm.config:VllmConfig", has="scheduler_config cache_config model_config"),
        Name(path="vllm.config:SchedulerConfig", has="max_num_seqs max_num_active_seqs"),
        Name(path="vllm.config:CacheConfig", has="num_gpu_blocks block_size"),
        Name(path="vllm.config:ModelConfig", has="max_model_len"),
        Name(path=f"{_TRANSFER}.base:WeightTransferInitRequest", call="init_info="),
        Name(path=f"{_TRANSFER}.base:WeightTransferUpdateRequest", call="update_info="),
        Name(path="vllm.envs:enable_envs_cache", call=""),
    ),
    "workers/engines/scheduling.py": (
        Name(path="vllm.v1.core.sched.async_scheduler:AsyncScheduler"),
        Name(path=_SCHEDULER, has="requests kv_cache_manager"),
        Name(path=f"{_SCHEDULER}.update_from_output", call="scheduler_output model_runner_output"),
        Name(path=f"{_SCHEDULER}.finish_requests", call="request_ids finished_status"),
        Name(path="vllm.v1.outputs:LogprobsLists", call="token_ids logprobs ranks"),
        Name(path="vllm.v1.engine:EngineCoreOutputs", has="outputs"),
        Name(path="vllm.v1.engine:EngineCoreOutput", has="request_id new_logprobs finish_reason"),
        Name(path="vllm.v1.request:Request", has="request_id sampling_params"),
        Name(path="vllm.config:SchedulerConfig", has="async_scheduling"),
    ),
    "workers/engines/blocks.py": (
        Name(path=f"{_KEEPER}:KVCacheManager", has="coordinator enable_caching empty_kv_cache_blocks max_model_len"),
        Name(path=f"{_KEEPER}:KVCacheManager.allocate_slots", call="request num_new_tokens num_lookahead_tokens="),
        Name(path="vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator", has="single_type_managers"),
        Name(path="vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks", call="request computed"),
        Name(
            path="vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
            has="block_size block_pool req_to_blocks num_cached_block",
        ),
        Name(path="vllm.v1.core.block_pool:BlockPool", has="hash_block_size"),
        Name(path="vllm.v1.request:Request", has="request_id num_computed_tokens num_tokens"),
    ),
    "workers/engines/life.py": (
        _engine("errored"),
        _engine("is_paused", ""),
        Name(
            path="vllm.v1.metrics.loggers:StatLoggerBase", public="record log_engine_initialized log record_sleep_state"
        ),
        Name(path="vllm.v1.metrics.loggers:StatLoggerBase.record", call="scheduler_stats= iteration_stats="),
        Name(path="vllm.v1.metrics.loggers:StatLoggerBase.record_sleep_state", call="is_awake level"),
        Name(path="vllm.v1.metrics.stats:IterationStats", has="num_prompt_tokens"),
    ),
    "workers/engines/load.py": (
        Name(
            path="vllm.v1.metrics.stats:SchedulerStats",
            has="num_running_reqs num_waiting_reqs num_skipped_waiting_reqs kv_cache_usage spec_decoding_stats",
        ),
        Name(
            path="vllm.v1.spec_decode.metrics:SpecDecodingStats", has="num_drafts num_draft_tokens num_accepted_tokens"
        ),
        Name(path="vllm.v1.metrics.stats:IterationStats", has="num_generation_tokens num_preempted_reqs"),
    ),
    "workers/engines/arguments.py": (
        Name(
            path=_ARGS,
            has="dtype max_model_len seed trust_remote_code load_format enforce_eager enable_chunked_prefill "
            "max_num_batched_tokens distributed_executor_backend enable_sleep_mode",
        ),
        Name(path="vllm.config.parallel:DistributedExecutorBackend", holds="uni mp"),
        Name(path="vllm.model_executor.model_loader:LoadFormats", holds="safetensors"),
    ),
    "workers/engines/extension.py": (
        Name(path="vllm.triton_utils:HAS_TRITON"),
        Name(path="vllm.triton_utils.dispatcher:register_kernels", call="kernels"),
        Name(path="vllm.v1.sample.rejection_sampler:expand_kernel"),
        Name(path="vllm.v1.worker.gpu_worker:Worker", has="available_kv_cache_memory_bytes"),
    ),
    "workers/judging/process.py": (Name(path="vllm.entrypoints.launchers.api_server.entry:main", call=""),),
    "workers/judging/server.py": (Name(path="vllm.envs:environment_variables", holds="VLLM_API_KEY"),),
    "workers/placement.py": (
        Name(
            path="vllm.envs:environment_variables",
            holds="VLLM_LOGGING_LEVEL VLLM_NO_USAGE_STATS VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND "
            "VLLM_ENABLE_V1_MULTIPROCESSING",
        ),
    ),
    "workers/weights/receiver.py": (
        Name(path="vllm.config:VllmConfig"),
        Name(path="vllm.config:ParallelConfig", has="rank"),
        Name(path="vllm.config:ModelConfig", has="hf_config word_embeddings_untied_by_checkpoint"),
        Name(path="vllm.config:set_current_vllm_config", call="config"),
        Name(path=f"{_TRANSFER}:WeightTransferEngineFactory"),
        Name(path=f"{_TRANSFER}:WeightTransferEngineFactory.register_engine", call="name engine"),
        Name(
            path=f"{_TRANSFER}.base:WeightTransferEngine",
            abstract="init_transfer_engine start_weight_update receive_weights finish_weight_update shutdown",
            has="init_info_cls update_info_cls model model_config parallel_config",
        ),
        Name(path=f"{_TRANSFER}.base:WeightTransferEngine.init_transfer_engine", call="init_info"),
        Name(path=f"{_TRANSFER}.base:WeightTransferEngine.start_weight_update", call=""),
        Name(path=f"{_TRANSFER}.base:WeightTransferEngine.receive_weights", call="update_info"),
        Name(path=f"{_TRANSFER}.base:WeightTransferEngine.finish_weight_update", call=""),
        Name(path=f"{_TRANSFER}.base:WeightTransferEngine.shutdown", call=""),
        Name(path=f"{_TRANSFER}.base:WeightTransferInitInfo"),
        Name(path=f"{_TRANSFER}.base:WeightTransferUpdateInfo"),
        Name(path="vllm.model_executor.model_loader.reload:initialize_layerwise_reload", call="model"),
        Name(path="vllm.model_executor.model_loader.reload:finalize_layerwise_reload", call="model model_config"),
        Name(path="vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding", has="quant_method"),
        Name(
            path="vllm.model_executor.layers.vocab_parallel_embedding:"
            "UnquantizedEmbeddingMethod.process_weights_after_loading",
            call="module",
        ),
        Name(
            path="vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
            has="moe_kernel",
        ),
        Name(path="vllm.model_executor.models.qwen2:Qwen2ForCausalLM.load_weights", call="tensors"),  # as all models'
        Name(path="vllm.utils.nccl:unpinned_nccl_env", call=""),
        Name(path="vllm.v1.worker.gpu_model_runner:GPUModelRunner", has="device kv_caches model"),
        Name(path="vllm.v1.worker.gpu_worker:Worker", has=_WORKER),
        Name(path="vllm.v1.worker.cpu_worker:CPUWorker", has=_WORKER),
    ),
    "workers/training/parity.py": (Name(path=_ARGS, has="dtype quantization kv_cache_dtype"),),
    "dapo/config/devices.py": (Name(path=_ARGS, has="tensor_parallel_size pipeline_parallel_size"),),
    "dapo/config/checks.py": (
        Name(
            path=_ARGS,
            has="model tokenizer skip_tokenizer_init seed logprobs_mode worker_extension_cls weight_transfer_config "
            "data_parallel_size nnodes prefill_context_parallel_size max_model_len",
        ),
    ),
    "dapo/config/facts/vllm_source.py": (Name(path="vllm.engine.arg_utils:EngineArgs"), Name(path=_ARGS)),
    "dapo/plan/engine.py": (
        Name(
            path=_ARGS,
            has="gpu_memory_utilization max_num_seqs max_num_batched_tokens block_size kv_cache_memory_bytes",
        ),
    ),
}
_PATHS = {path.partition(":")[2]: path for names in USES.values() for path in (name.path for name in names)}


def __getattr__(name: str) -> Any:
    """Returns vLLM's class or function of that name. The first one that a process asks for has all of them checked.

    Raises:
        RuntimeError: as `require` does.
    """
    if "." in name or name not in _PATHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; what we use of vLLM has a row in USES")
    require()
    return find(_PATHS[name])[1]


@functools.cache
def require() -> None:
    """Checks what engines need of the installed vLLM, as far as this process can without loading `SLOW` modules.

    Raises:
        RuntimeError: something is missing or has changed; lists all of it.
    """
    if found := [problem for file in USES if file.startswith("workers/") for problem in problems(file)]:
        raise RuntimeError(
            f"vLLM {importlib.import_module('vllm').__version__} lacks what dapo relies on; dapo knows vLLM {KNOWN}: "
            "install the version that docker/cpu.lock or docker/gpu.lock pins\n  " + "\n  ".join(found)
        )


def problems(file: str, *, slow: bool = False) -> Iterator[str]:
    """Yields what `file` relies on and the installed vLLM lacks, one line each. slow: look also into modules of `SLOW`
    that this process has not loaded."""
    for name in USES[file]:
        module, _, qualified = name.path.partition(":")
        if slow or module in sys.modules or not module.startswith(SLOW):
            for problem in broken(name):
                yield f"{module}: `{qualified}` {problem} ({file} uses it)"
