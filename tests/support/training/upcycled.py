"""A mixture of experts that computes what a dense Qwen2 model does, and so can be trained at once: each expert begins
as the dense MLP ("sparse upcycling", arXiv 2212.05055)."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2MoeConfig, Qwen2MoeForCausalLM


def upcycle(dense: str, folder: Path, *, experts: int = 4, per_token: int = 2, noise: float = 0.0) -> Path:
    """Writes the model and its tokenizer to `folder`. noise: relative, by which experts differ from each other."""
    source = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    mixture = {
        "moe_intermediate_size": source.config.intermediate_size,
        "shared_expert_intermediate_size": 32,
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "norm_topk_prob": True,  # the chosen experts' shares add up to 1
    }
    kept = {key: value for key, value in source.config.to_dict().items() if key != "model_type"}
    torch.manual_seed(0)
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**(kept | mixture | {"architectures": ["Qwen2MoeForCausalLM"]})))
    with torch.no_grad():
        missing = model.load_state_dict(source.state_dict(), strict=False).missing_keys
        assert all(".mlp." in name for name in missing), missing
        for layer, old in zip(model.model.layers, source.model.layers, strict=True):
            made = {"gate_up_proj": (old.mlp.gate_proj, old.mlp.up_proj), "down_proj": (old.mlp.down_proj,)}
            for name, projections in made.items():
                parameter = getattr(layer.mlp.experts, name)
                parameter.copy_(torch.cat([each.weight for each in projections]).expand_as(parameter))
                parameter.mul_(1 + noise * torch.randn_like(parameter))
            layer.mlp.shared_expert.down_proj.weight.zero_()
    model.generation_config = source.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(dense).save_pretrained(folder)
    return folder
