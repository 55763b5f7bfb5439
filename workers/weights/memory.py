"""Shares memory that an actor rank writes and the engine next to it reads: CUDA IPC on a GPU that both roles share,
shared memory of the machine without one.

In: a size. Out: a buffer and a handle of plain values for another process; there, the same memory once more. The
writer's buffer must outlive the readers; nothing here tells when it may be overwritten.
"""

import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Handle = dict[str, Any]
# What torch gives for a CUDA tensor to be opened elsewhere, by position; the rest is the same for every buffer.
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
    """Returns the name of what must be the same on both ends: the GPU, or the machine (and container, which hides
    processes).
    """
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def share(num_bytes: int, device: torch.device) -> tuple[Tensor, Handle]:
    """Returns a new buffer [num_bytes] uint8 and its handle, which one other process may open, once."""
    if device.type == "cuda":
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return buffer, _cuda_handle(buffer)
    file = os.memfd_create("dapo-weights")  # has no name that a killed process could leave behind
    os.ftruncate(file, num_bytes)
    handle = {"num_bytes": num_bytes, "path": f"/proc/{os.getpid()}/fd/{file}"}
    buffer = open_shared(handle, device)
    weakref.finalize(buffer, os.close, file)
    return buffer, handle


def share_again(buffer: Tensor, handle: Handle) -> Handle:
    """Returns another handle of a buffer that `share` gave with `handle`, for another process or another time.

    A new buffer would be wrong: torch keeps one on a GPU for ever where a handle was never opened, or by a process that
    was killed.
    """
    return _cuda_handle(buffer) if buffer.device.type == "cuda" else handle


def _cuda_handle(buffer: Tensor) -> Handle:
    from torch.multiprocessing.reductions import reduce_tensor

    _, fields = reduce_tensor(buffer)
    return {"num_bytes": len(buffer)} | {name: _plain(fields[i]) for name, i in _CUDA_FIELDS.items()}


def open_shared(handle: Handle, device: torch.device) -> Tensor:
    """Returns the buffer behind a handle that another process on the same `place` made."""
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
        device.index or 0,  # the reader's own number of the GPU
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
