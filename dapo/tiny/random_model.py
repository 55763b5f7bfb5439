"""Makes a random model whose responses end at random: long-tailed lengths for the benchmark and for tests.

In: a folder and a vocabulary size. Out: a Qwen2 model and its character tokenizer. The next token is almost uniform,
so the stop comes with probability about 1/vocab_size at each: lengths are geometric with a mean of about vocab_size.
"""

from pathlib import Path

from dapo.tiny.model import make_model, save_model
from dapo.tiny.tokenizer import make_tokenizer

# Small, so that logits lie close together; larger values make some responses prefer or avoid the stop.
_INIT_STD = 0.01


def make_random_model(
    path: str | Path,
    *,
    vocab_size: int = 110,
    seed: int = 0,
    tie_word_embeddings: bool = True,
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    key_value_heads: int = 2,
    intermediate: int = 448,
    max_positions: int = 4096,
) -> Path:
    """Writes the model and its tokenizer to `path`, which it makes, and returns the path.

    Raises ValueError when `vocab_size` has no room for ASCII, or when the sizes do not divide.
    """
    if hidden % heads or heads % key_value_heads:
        raise ValueError(
            f"`hidden` ({hidden}) must be a multiple of `heads` ({heads}), and that of `key_value_heads` "
            f"({key_value_heads}); change one of them"
        )
    tokenizer = make_tokenizer(vocab_size, max_length=max_positions)
    model = make_model(
        tokenizer,
        seed=seed,
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=key_value_heads,
        intermediate=intermediate,
        tie_word_embeddings=tie_word_embeddings,
        max_positions=max_positions,
        initializer_range=_INIT_STD,
    )
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, folder)
    return folder
