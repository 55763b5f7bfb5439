"""Makes a random model whose responses end at random: long-tailed lengths for the benchmark and for tests.

In: a folder and a vocabulary size. Out: a Qwen2 model and its character tokenizer. The next token is almost uniform,
so the stop comes with probability about 1/vocab_size at each: lengths are geometric with a mean of about vocab_size.
"""

from pathlib import Path
from typing import Any

from dapo.tiny.model import make_model, save_model
from dapo.tiny.tokenizer import make_tokenizer

# Small, so that logits lie close together; larger values make some responses prefer or avoid the stop.
_INIT_STD = 0.01


def make_random_model(
    path: str | Path,
    *,
    vocab_size: int = 110,
    seed: int = 0,
    max_positions: int = 4096,
    **sizes: Any,
) -> Path:
    """Writes the model and its tokenizer to `path`, which it makes, and returns the path. sizes: of `make_model`.

    Raises ValueError when `vocab_size` has no room for ASCII, or when the sizes do not divide.
    """
    tokenizer = make_tokenizer(vocab_size, max_length=max_positions)
    model = make_model(tokenizer, seed=seed, max_positions=max_positions, initializer_range=_INIT_STD, **sizes)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, folder)
    return folder
