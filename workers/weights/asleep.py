"""Frees memory of a sleeping engine on a CPU, because vLLM's own sleep mode supports only GPUs. Freed memory returns to
the machine until it is written again; until then it reads as zeros."""

import ctypes
import mmap
import os
from collections.abc import Iterable

import torch
from torch import Tensor

DONT_NEED = 4  # MADV_DONTNEED of madvise(2): frees private memory, which then reads as zeros


def free(tensors: Iterable[Tensor]) -> int:
    """Frees the whole pages of these tensors, shared storages once; returns bytes. Packed tensors are skipped: oneDNN
    owns their memory. Raises OSError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    freed = 0
    for start, size in {storage.data_ptr(): storage.nbytes() for storage in storages}.items():
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length <= 0:
            continue
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), DONT_NEED):
            number = ctypes.get_errno()
            raise OSError(number, f"the kernel does not take {length} bytes back: {os.strerror(number)}")
        freed += length
    return freed
