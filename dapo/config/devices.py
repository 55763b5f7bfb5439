"""Peak FLOP/s by device name, and GPUs per engine from vLLM's arguments."""

from collections.abc import Mapping
from typing import Any

# Dense bfloat16 FLOP/s by words in torch's device name, from vendor data sheets ("with sparsity" figures halved). The
# first match counts: variants of the H100 come before H100.
PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L4": 121e12,
}


def peak_flops(device: str) -> float | None:
    """Returns the FLOP/s from `PEAK_FLOPS` for torch's name of a device; None if unknown."""
    words = f" {device.replace('-', ' ')} "
    return next((peak for name, peak in PEAK_FLOPS.items() if f" {name} " in words), None)


def gpus_per_engine(engine_args: Mapping[str, Any]) -> int:
    """Returns the GPUs, and worker processes, of one engine: tensor times pipeline parallel size."""
    return int(engine_args.get("tensor_parallel_size", 1)) * int(engine_args.get("pipeline_parallel_size", 1))
