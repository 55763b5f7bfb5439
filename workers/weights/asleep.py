"""Frees what an engine on a CPU can free while it sleeps: vLLM's own sleep mode knows GPUs alone.

In: tensors. Out: their memory belongs to the machine again until somebody writes to them; until then they are zeros.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable

import torch
from torch import Tensor

DONT_NEED = 4  # of madvise(2): private memory is given back, and reads as zeros from then on


def free(tensors: Iterable[Tensor]) -> int:
    """Gives back the whole pages of these tensors, of what several share once. Returns bytes.

    Packed tensors keep their memory, which is oneDNN's. Raises OSError where the kernel refuses.
    """
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
