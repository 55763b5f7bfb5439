"""Computes sampling seeds by counting instead of keeping generators: the same words give the same seed, in any process.

In: what names a response. Out: 63-bit seeds, of its first token and of the place where it is taken up again.
"""

import hashlib


def response_seed(*words: int | str) -> int:
    """Returns a 63-bit sampling seed from run seed, draw, policy version, sample and, where the draw was set aside at
    that version, how often: the same for a retry, new for all else."""
    image = "/".join(str(word) for word in words).encode()
    return int.from_bytes(hashlib.blake2b(image, digest_size=8).digest(), "big") >> 1


def continued_seed(seed: int, tokens: int) -> int:
    """Returns the seed by which a response goes on after so many tokens. An engine counts noise from the start of its
    request: under `seed` again, the rest would be drawn with the noise that drew the beginning."""
    return response_seed("continued", seed, tokens) if tokens else seed
