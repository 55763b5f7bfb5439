"""Which layers have adapters: by name, in models of another layout, and what is refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dapo.config.actor import LoraConfig
from dapo.workers.training.lora import add_adapters, base_name, init_adapters, is_adapter, merged
from tests.support.training.model_families import FAMILIES, save_model
from tests.support.training.plain_reference import reference


@pytest.fixture
def model(tied_dir: Path) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tied_dir))


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        pytest.param(["all-linear"], 14, id="all_linear_but_the_head"),
        pytest.param(["q_proj", "o_proj"], 4, id="by_the_last_name"),
        pytest.param(["model.layers.1.mlp.up_proj"], 1, id="by_the_whole_name"),
    ],
)
def test_targets(model: PreTrainedModel, targets: list[str], count: int) -> None:
    names = [name for name, _ in model.named_parameters()]
    add_adapters(model, LoraConfig(rank=2, target_modules=targets))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * count and all(map(is_adapter, trained))
    assert all(p.is_meta for p in model.parameters())
    assert [base_name(name) for name, p in model.named_parameters() if not p.requires_grad] == names


@pytest.mark.parametrize(("targets", "count"), [(["all-linear"], 8), (["c_attn", "h.1.mlp.c_fc"], 3)])
def test_layers_of_gpt2_have_adapters_although_their_weights_lie_the_other_way(
    tmp_path: Path, targets: list[str], count: int
) -> None:
    save_model(FAMILIES["GPT-2"], tmp_path)
    model, plain = reference(tmp_path), reference(tmp_path)
    add_adapters(model, LoraConfig(rank=2, alpha=8, target_modules=targets))
    init_adapters(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 2 * count

    tokens = torch.arange(12)[None]
    with torch.no_grad():
        adapted, base = model(tokens).logits, plain(tokens).logits
        plain.load_state_dict(dict(merged(model, lambda tensor: tensor)), strict=False)
        found = plain(tokens).logits
    torch.testing.assert_close(found, adapted, rtol=1e-4, atol=1e-4)
    assert (adapted - base).abs().max() > 0.1


@pytest.mark.parametrize("target", ["qkv_proj", "lm_head", "proj", "mlp"])
def test_a_target_that_is_no_linear_layer_is_refused(model: PreTrainedModel, target: str) -> None:
    with pytest.raises(ValueError, match=rf"`model.lora.target_modules` \({target}\) .* q_proj, k_proj, .*all-linear"):
        add_adapters(model, LoraConfig(rank=2, target_modules=["q_proj", target]))
