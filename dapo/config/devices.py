"""Knows the arithmetic of devices: the name that torch gives one in, FLOP/s out; vLLM's arguments in, GPUs out."""

from collections.abc import Mapping
from typing import Any

# FLOP/s of dense bfloat16 products, by words in the name that torch gives a device; from the maker's data sheets, where
# "with sparsity" is halved. The first that fits counts: H100's other builds come before H100.
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
    """Returns the FLOP/s of a device by its name, as `PEAK_FLOPS` has them; None where it is not known."""
    words = f" {device.replace('-', ' ')} "
    return next((peak for name, peak in PEAK_FLOPS.items() if f" {name} " in words), None)


def gpus_per_engine(engine_args: Mapping[str, Any]) -> int:
    """Counts one engine's GPUs, and its worker processes: tensor times pipeline parallel size of vLLM's arguments."""
    return int(engine_args.get("tensor_parallel_size", 1)) * int(engine_args.get("pipeline_parallel_size", 1))
