"""Names what each role makes of its machine, `perf/ROLE/NAME`.

In: nothing. Out: `USAGE`, a part of the reference in `names.py`.
"""

from dapo.report.metric import Family, Metric

ENGINE = Family(
    "perf/engine",
    "the engines in the step, evaluation included, by vLLM's statistics; depends on timing",
    "workers/engines/load.py",
    (
        Metric("tokens_per_s", "tokens/s", "Σ over engines: tokens generated / seconds"),
        Metric("{n}/tokens_per_s", "tokens/s", "of engine n, seconds without a request included"),
        Metric("tokens_per_s_per_gpu", "tokens/s", "`tokens_per_s` / GPUs of the engines; not on CPUs"),
        Metric(
            "running_mean",
            "requests",
            "Σ over engines: mean over time of the requests that run",
            "vllm:num_requests_running",
        ),
        Metric(
            "waiting_mean", "requests", "Σ over engines: of those that wait in an engine", "vllm:num_requests_waiting"
        ),
        Metric("kv_use_mean", "share", "KV cache in use, mean over time and engines", "vllm:kv_cache_usage_perc"),
        Metric("kv_use_max", "share", "the greatest of an engine"),
        Metric(
            "preemptions",
            "requests",
            "put back because the KV cache was full; without those that a weight sync puts back",
            "vllm:num_preemptions",
        ),
        Metric(
            "draft_acceptance",
            "share",
            "drafted tokens that were kept / drafted tokens, where `rollout.vllm.speculative_config` drafts",
            "vllm:spec_decode_num_accepted_tokens / vllm:spec_decode_num_draft_tokens",
        ),
        Metric(
            "tokens_per_draft",
            "tokens",
            "1 + tokens kept / drafts: what one pass of the model gives a request for which tokens were drafted",
        ),
        Metric(
            "idle",
            "share",
            "1 − seconds in which a request ran / seconds, mean over the engines that are not lent GPUs; a weight sync "
            "is idle",
        ),
        Metric("resident_bytes", "bytes", "resident memory of the largest engine, its processes together"),
    ),
)

REWARD_WORKERS = Family(
    "perf/reward",
    "the reward workers in the step, evaluation included; depends on timing",
    "workers/reward.py",
    (
        Metric(
            "queue_mean",
            "responses",
            "mean over time of the responses without their verdict, those being scored included",
        ),
        Metric("queue_max", "responses", "the greatest"),
        Metric(
            "idle",
            "share",
            "1 − Σ seconds of scoring / (seconds × `reward.num_workers` × `reward.children_per_worker`)",
        ),
        Metric(
            "resident_bytes",
            "bytes",
            "resident memory of the largest worker with its child processes; pages that they share count for each",
        ),
    ),
)

RANK = Family(
    "perf/rank",
    "the actor ranks in the step; depends on timing",
    "workers/training/use.py, dapo/report/metrics.py",
    (
        Metric("idle", "share", "1 − (`reference_s` + `update_s` + `sync_s`) / `step_s`"),
        Metric(
            "mfu",
            "share",
            "model FLOPs of the update / (its seconds × Σ peak FLOP/s of the ranks' GPUs in bfloat16), where the GPU "
            "(`PEAK_FLOPS` in dapo/config/devices.py) and the model's shape are known; model FLOPs = 3 × forward pass "
            "of each optimizer step, 2 × with LoRA",
            "perf/mfu/actor",
        ),
        Metric(
            "tokens_per_s_per_gpu",
            "tokens/s",
            "prompt and response tokens of the batch / (seconds of the update × ranks); not on CPUs",
        ),
        Metric("resident_bytes", "bytes", "resident memory of the largest rank", "perf/cpu_memory_used_gb"),
        Metric(
            "gpu_peak_bytes",
            "bytes",
            "the most that torch held allocated on one GPU during the update; not on CPUs",
            "perf/max_memory_allocated_gb",
        ),
    ),
)

LENDING = Family(
    "perf/lending",
    "the engines on the actors' GPUs with `trainer.colocate=lend`, in the step; depends on timing",
    "dapo/sampling/lender.py",
    (
        Metric("wakes", "", "times that they were woken: 0 or 1"),
        Metric("awake_s", "s", "in which they served"),
        Metric("forecast_s", "s", "by which the rule expected the update to begin earlier; 0 for the first, a trial"),
        Metric("wake_s", "s", "the last wake, from the first bucket of weights until they served"),
        Metric("sleep_s", "s", "the last time that they put down what they ran and fell asleep"),
    ),
)

USAGE = (ENGINE, LENDING, RANK, REWARD_WORKERS)
