"""Digest of a bucket of weights, computed where it lies: on a GPU without a copy to the host (DESIGN section 8).

In: bytes in a tensor. Out: 16 hexadecimal digits, the same on every device. It finds errors of programs and hardware,
not forgeries: changing one word always changes it, other changes (swapped words or tensors, shifts) but for a chance of
about 2^-64.
"""

import torch
from torch import Tensor

_WORDS_PER_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}  # what a core's cache holds; few kernel starts, 128 MiB of scratch


def _signed(value: int) -> int:
    """The int64 with these 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


# Odd, so that multiplying by them modulo 2^64 loses nothing; the constants of Steele, Lea and Flood's SplitMix64.
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


@torch.no_grad()
def digest(data: Tensor) -> str:
    """data: [N] uint8, contiguous, N a multiple of 8. The sum modulo 2^64 of a hash of each word and its position."""
    words = data.view(torch.int64)
    chunk = min(_WORDS_PER_CHUNK[data.device.type], max(1, len(words)))
    keys = torch.arange(chunk, dtype=torch.int64, device=data.device) * _signed(_STEP)
    scratch = torch.empty_like(keys)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, len(words), chunk):
        part = words[start : start + chunk]
        mixed = torch.add(part, keys[: len(part)], out=scratch[: len(part)])
        mixed.add_(_signed(start * _STEP))
        halves = mixed.view(torch.int32).view(-1, 2)  # the lower half first: all our machines are little-endian
        for factor in (_FIRST, _SECOND):
            mixed.mul_(factor)
            halves[:, 0] ^= halves[:, 1]
        total += mixed.sum()
    return f"{int(total) & ((1 << 64) - 1):016x}"
