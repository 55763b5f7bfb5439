"""Makes and saves the tiny Qwen2 model (float32, about 0.9M parameters by default)."""

from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer


def make_model(
    tokenizer: Qwen2Tokenizer,
    *,
    seed: int,
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    key_value_heads: int = 2,
    intermediate: int = 448,
    tie_word_embeddings: bool = True,
    max_positions: int = 4096,
    initializer_range: float = 0.02,
) -> Qwen2ForCausalLM:
    """Returns a model with random weights for the tokenizer's vocabulary; the same seed gives the same weights. Raises
    ValueError when the sizes do not divide."""
    if hidden % heads or heads % key_value_heads:
        raise ValueError(
            f"`hidden` ({hidden}) must be a multiple of `heads` ({heads}), and that of `key_value_heads` "
            f"({key_value_heads}); change one of them"
        )
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=max_positions,
        # Wavelengths from 6 to a few thousand tokens: the problems are tens of tokens long.
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config)


def save_model(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Writes weights, configurations and tokenizer in the format of `transformers` and vLLM. The generation
    configuration names only the stop and padding tokens: vLLM would take sampling options in it as defaults for every
    request."""
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    # safetensors makes the file readable by its owner only; a package or an image is read by other users.
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
