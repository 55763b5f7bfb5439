"""Shares memory that an actor rank writes and an engine reads: CUDA IPC on a GPU that both use, otherwise shared memory
of the machine.

A buffer has a handle of plain values, by which another process opens the same memory. The writer's buffer must outlive
the readers. Nothing here reports when it may be overwritten.
"""

import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Handle = dict[str, Any]
# Positions in torch's description of a shared CUDA tensor; the rest is the same for every buffer.
_CUDA_FIELDS = {
    "memory": 7,
    "memory_bytes": 8,
    "offset_bytes": 9,
    "counter": 11,
    "counter_offset": 12,
    "event": 13,
    "event_needed": 14,
}


def place(device: torch.device) -> str:
    """Returns what must be equal on both ends: the GPU, or the machine with its pid namespace (containers hide
    processes)."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def share(num_bytes: int, device: torch.device) -> tuple[Tensor, Handle]:
    """Returns a new buffer [num_bytes] uint8 and its handle, which one other process may open, once."""
    if device.type == "cuda":
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return buffer, _cuda_handle(buffer)
    file = os.memfd_create("dapo-weights")  # a killed process leaves no file behind
    os.ftruncate(file, num_bytes)
    handle = {"num_bytes": num_bytes, "path": f"/proc/{os.getpid()}/fd/{file}"}
    buffer = open_shared(handle, device)
    weakref.finalize(buffer, os.close, file)
    return buffer, handle


def share_again(buffer: Tensor, handle: Handle) -> Handle:
    """Returns another handle of a buffer of `share`, for another process or another time. Do not make a new buffer:
    torch never frees one on a GPU whose handle was not opened, or was opened by a process that was killed."""
    return _cuda_handle(buffer) if buffer.device.type == "cuda" else handle


def _cuda_handle(buffer: Tensor) -> Handle:
    from torch.multiprocessing.reductions import reduce_tensor

    _, fields = reduce_tensor(buffer)
    return {"num_bytes": len(buffer)} | {name: _plain(fields[i]) for name, i in _CUDA_FIELDS.items()}


def open_shared(handle: Handle, device: torch.device) -> Tensor:
    """Returns the buffer of a handle that another process on the same `place` made."""
    num_bytes = handle["num_bytes"]
    if device.type != "cuda":
        return torch.from_file(handle["path"], shared=True, size=num_bytes, dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    return rebuild_cuda_tensor(
        torch.Tensor,
        (num_bytes,),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        device.index or 0,  # the GPU's index in the reader
        bytes.fromhex(handle["memory"]),
        handle["memory_bytes"],
        handle["offset_bytes"],
        False,
        bytes.fromhex(handle["counter"]),
        handle["counter_offset"],
        bytes.fromhex(handle["event"]),
        handle["event_needed"],
    )


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value
