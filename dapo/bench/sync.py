"""Benchmark of the weight sync: `python -m dapo.bench.sync [--shape 100m] [--transports broadcast ...]`.

Real actor ranks and engines with random weights; the transports take turns in one run, so that noise of a shared
machine hits all of them. Printed: seconds of a whole sync, from pausing the engines to their going on, and the bytes of
the model per second. The first sync of each turn connects both ends and is not counted. The vocabulary is tiny.

On a GPU: `--device cuda --ranks 1 --colocate --transports ipc --shape 7b` for both roles on one, else one GPU each.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from dapo.config.actor import TRANSPORTS
from dapo.config.checks import validate
from dapo.config.schema import Config
from dapo.derived import resolve_transport
from dapo.tiny.random_model import make_random_model
from workers.actor import ActorPool
from workers.cluster import Placement, connect, engine_args, resolve_device
from workers.rollout import RolloutPool
from workers.weight_sync import WeightSync

# Layers and sizes; the larger ones are Qwen2.5's without its vocabulary.
SHAPES: dict[str, dict[str, Any]] = {
    "1m": {"layers": 4, "hidden": 128, "heads": 4, "key_value_heads": 2, "intermediate": 448},
    "100m": {"layers": 12, "hidden": 768, "heads": 12, "key_value_heads": 4, "intermediate": 3072},
    "0.5b": {"layers": 24, "hidden": 896, "heads": 14, "key_value_heads": 2, "intermediate": 4864},
    "1.5b": {"layers": 28, "hidden": 1536, "heads": 12, "key_value_heads": 2, "intermediate": 8960},
    "7b": {"layers": 28, "hidden": 3584, "heads": 28, "key_value_heads": 4, "intermediate": 18944},
}
LENGTH = 64  # tokens of prompt and response; nothing is generated


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m dapo.bench.sync", description="Seconds of a weight sync.")
    parser.add_argument("--shape", choices=SHAPES, default="100m")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=["auto"])
    parser.add_argument("--ranks", type=int, default=2, help="actor ranks")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--colocate", action="store_true", help="engines and ranks share GPUs; needed for ipc")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3, help="of each transport")
    parser.add_argument("--syncs", type=int, default=2, help="counted syncs of a turn")
    return parser.parse_args(arguments)


def to_config(options: argparse.Namespace, path: str) -> Config:
    """What the pools are started with. Raises ValueError for options that do not go together."""
    cfg = Config()
    cfg.model.path = path
    cfg.model.dtype = "bfloat16" if options.device == "cuda" else "float32"
    cfg.data.max_prompt_length = cfg.data.max_response_length = LENGTH
    cfg.reward.overlong_buffer.enable = False
    cfg.rollout.num_engines = options.engines
    cfg.rollout.vllm = {"max_num_seqs": 8}
    if options.colocate:
        cfg.rollout.vllm["gpu_memory_utilization"] = 0.3
    cfg.actor.num_workers = options.ranks
    cfg.actor.max_tokens_per_gpu = 2 * LENGTH
    cfg.weight_sync.bucket_bytes = options.bucket_mib << 20
    cfg.trainer.device, cfg.trainer.colocate = options.device, options.colocate
    validate(cfg)
    return cfg


async def measure(cfg: Config, transports: Sequence[str], turns: int, syncs: int) -> dict[str, list[float]]:
    """Seconds of each counted sync by transport. Inside a Ray cluster."""
    device = resolve_device(cfg.trainer.device)
    placement = Placement(cfg, device)
    engines = RolloutPool(
        placement.rollout(), start_timeout_s=cfg.rollout.start_timeout_s, timeout_s=cfg.rollout.timeout_s
    )
    actors = ActorPool(cfg, device, placement.actors())
    seconds: dict[str, list[float]] = {transport: [] for transport in transports}
    version = 0
    try:
        await engines.start(cfg.model.path, engine_args(cfg, device))
        await actors.start()
        for _ in range(turns):
            for transport in transports:
                cfg.weight_sync.transport = transport
                sync = WeightSync(actors, engines, cfg.weight_sync, resolve_transport(cfg))
                for number in range(syncs + 1):
                    version += 1
                    began = time.monotonic()
                    await sync(version)
                    if number:
                        seconds[transport].append(time.monotonic() - began)
    finally:
        actors.close()
        await engines.stop(3.0)
    return seconds


def model_elements(path: str) -> int:
    """Of all tensors in the model's files."""
    total = 0
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():
                rows = 1
                for size in tensors.get_slice(name).get_shape():
                    rows *= size
                total += rows
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the model, measures, prints."""
    import ray

    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = str(make_random_model(Path(folder) / "model", **SHAPES[options.shape]))
        cfg = to_config(options, path)
        elements = model_elements(path)
        connect("local", worker_logs=False)
        try:
            seconds = asyncio.run(measure(cfg, options.transports, options.turns, options.syncs))
        finally:
            ray.shutdown()
    size = elements * (2 if cfg.model.dtype == "bfloat16" else 4)
    print(
        f"{elements / 1e6:.0f}M parameters, {size / 1e6:.0f} MB in {cfg.model.dtype}, {options.bucket_mib} MiB buckets"
    )
    print(f"{'transport':>14} {'median s':>9} {'fastest s':>9} {'GB/s':>6}")
    for transport, each in seconds.items():
        median = statistics.median(each)
        print(f"{transport:>14} {median:>9.3f} {min(each):>9.3f} {size / median / 1e9:>6.2f}")


if __name__ == "__main__":
    main()
