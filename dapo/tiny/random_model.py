"""Makes a random Qwen2 model with a character tokenizer, whose responses have long-tailed random lengths. The next
token is almost uniform, so each is the stop token with a probability of about 1/vocab_size: lengths are geometric with
a mean of about vocab_size. Used by benchmarks and tests."""

from pathlib import Path
from typing import Any

from dapo.tiny.model import make_model, save_model
from dapo.tiny.tokenizer import make_tokenizer

# Small, so that logits are close together; larger values make some responses prefer or avoid the stop token.
_INIT_STD = 0.01


def make_random_model(
    path: str | Path,
    *,
    vocab_size: int = 110,
    seed: int = 0,
    max_positions: int = 4096,
    **sizes: Any,
) -> Path:
    """Writes the model and its tokenizer to `path`, which is created, and returns the path. sizes: of `make_model`.
    Raises ValueError when `vocab_size` has no room for ASCII, or when the sizes do not divide."""
    tokenizer = make_tokenizer(vocab_size, max_length=max_positions)
    model = make_model(tokenizer, seed=seed, max_positions=max_positions, initializer_range=_INIT_STD, **sizes)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, folder)
    return folder
