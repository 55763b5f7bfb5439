"""One tiny model of random weights for each family that the table in workers/README.md names."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.training.plain_reference import VOCABULARY, save_tokenizer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Family:
    """model_type: transformers' name. keys: of config.json, beside `SIZES`. refused: a part of the message before any
    worker starts; empty where it works."""

    model_type: str
    keys: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


FAMILIES = {
    "Llama": Family("llama"),
    "SmolLM": Family("llama", {"tie_word_embeddings": True}),
    "Mistral": Family("mistral"),
    "Qwen2, Qwen2.5": Family("qwen2"),
    "Qwen3": Family("qwen3", {"tie_word_embeddings": True}),
    "Phi-3": Family("phi3"),
    "OLMo 2": Family("olmo2"),
    "Seed-OSS": Family("seed_oss", {"residual_dropout": 0.1}),
    "GPT-2": Family("gpt2", GPT2),
    "GPT-NeoX": Family("gpt_neox"),
    "Gemma 3 (text)": Family("gemma3_text", {"sliding_window": 64}),
    "Gemma 2": Family("gemma2", refused="final_logit_softcapping"),
    "Qwen3-MoE": Family("qwen3_moe", EXPERTS),
    "Qwen2-MoE": Family("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "Mixtral": Family("mixtral", EXPERTS | {"router_jitter_noise": 0.1}),
    "OLMoE": Family("olmoe", EXPERTS),
    "GLM-4-MoE": Family("glm4_moe", EXPERTS, refused="of the kind glm4_moe"),
    "Qwen3.5": Family("qwen3_5", {"text_config": SIZES}, refused="has layers of linear_attention"),
    "LFM2": Family("lfm2", {"layer_types": ["conv", "full_attention"]}, refused="has layers of conv"),
}


def save_config(family: Family, directory: Path) -> None:
    """Writes config.json alone, which is all that the checks before a run read."""
    config = AutoConfig.for_model(family.model_type, **(SIZES | family.keys))
    config.architectures = ["Any"]
    config.save_pretrained(directory)


def save_model(family: Family, directory: Path) -> None:
    """Writes config.json and weights as transformers itself does, and a tokenizer."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family.model_type, **(SIZES | family.keys))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # biases and norms are constants otherwise
    model.save_pretrained(directory)
    save_tokenizer(directory)
