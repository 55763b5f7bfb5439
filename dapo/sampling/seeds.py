"""Derives sampling seeds from what identifies a response, instead of keeping generators: equal words give equal seeds
in any process."""

import hashlib


def response_seed(*words: int | str) -> int:
    """Returns a 63-bit seed. words: run seed, draw, policy version, sample and, if the draw was set aside at that
    version, how often. A retry gets the same seed."""
    image = "/".join(str(word) for word in words).encode()
    return int.from_bytes(hashlib.blake2b(image, digest_size=8).digest(), "big") >> 1


def continued_seed(seed: int, tokens: int) -> int:
    """Returns the seed for a response that continues after `tokens` tokens. An engine counts its random numbers from
    the start of a request: `seed` again would repeat the noise of the beginning."""
    return response_seed("continued", seed, tokens) if tokens else seed
