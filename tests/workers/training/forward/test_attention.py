"""Packed attention inside a transformers model against one run per sequence."""

import copy

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    OPTConfig,
    Qwen3Config,
)

from dapo.workers.training.forward.attention import Segments, implementation, packed_attention, why_unpackable

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def segments_of(lengths: list[int]) -> Segments:
    return Segments(tuple(lengths), torch.tensor([0, *lengths]).cumsum(0).int())


@pytest.mark.parametrize("name", ["auto", "sdpa"])
@pytest.mark.parametrize("lengths", [[9], [1, 7, 7, 30, 2], [1] * 5], ids=["one_sequence", "mixed", "single_tokens"])
def test_packed_equals_separate(lengths: list[int], name: str) -> None:
    """Other families: test_families."""
    config = Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    packed = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=implementation(name)).eval()
    packed.load_state_dict(plain.state_dict())
    sequences = [torch.randint(0, 50, (1, length)) for length in lengths]
    weights = torch.randn(sum(lengths), 50)

    wanted = torch.cat([plain(sequence).logits[0] for sequence in sequences])
    found = packed(
        torch.cat(sequences, dim=1),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        use_cache=False,
        segments=segments_of(lengths),
    ).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    ours, theirs = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (packed, plain))
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_a_model_is_refused_with_the_attention_that_would_mix_its_sequences() -> None:
    """OPT asks for its mask without positions: with sdpa, but not with ours, a sequence sees the one before it."""
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    config = OPTConfig(**options, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=256, init_std=0.3)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    first, other = (torch.tensor([[*start, 7, 8, 9, 10, 11]]) for start in ((2, 3, 4, 5), (6, 5, 4, 3)))
    for name, mixes in (("auto", False), ("sdpa", True)):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation(name)).eval()
        second, same = (
            model.base_model(
                tokens, position_ids=positions, use_cache=False, segments=segments_of([4, 5])
            ).last_hidden_state[:, 4:]
            for tokens in (first, other)
        )
        assert (torch.equal(second, same), bool(why_unpackable(model))) == (not mixes, mixes)


def test_what_it_cannot_compute_is_refused() -> None:
    x, module = torch.randn(1, 1, 5, 8), torch.nn.Identity()
    for options in ({"sliding_window": 4}, {"softcap": 30.0}, {"s_aux": torch.zeros(1)}):
        with pytest.raises(ValueError, match="`model.path`: Identity .* plain causal attention"):
            packed_attention(module, x, x, x, None, segments=segments_of([5]), **options)
    wide, _ = packed_attention(module, x, x, x, None, segments=segments_of([2, 3]), sliding_window=3)
    full, _ = packed_attention(module, x, x, x, None, segments=segments_of([2, 3]))
    assert torch.equal(wide, full), "no sequence exceeds the window"
    with pytest.raises(ValueError, match=r"`model.attn_implementation` \(flash\) is unknown.*flash_attention_2"):
        implementation("flash")


def test_another_attention_of_transformers_is_told_where_sequences_lie() -> None:
    """Its arguments are as flash attention wants them; its kernels run on GPUs alone."""
    told: dict[str, object] = {}

    def kernel(module: object, query: torch.Tensor, *args: object, **options: object) -> tuple[torch.Tensor, None]:
        told.update(options)
        return query.transpose(1, 2), None

    AttentionInterface.register("told", kernel)
    AttentionInterface()[implementation(implementation("told"))](
        torch.nn.Identity(), *[torch.randn(1, 2, 5, 8)] * 3, None, segments=segments_of([2, 3]), dropout=0.5
    )
    assert told.pop("cu_seq_lens_q").tolist() == told.pop("cu_seq_lens_k").tolist() == [0, 2, 5]  # type: ignore[attr-defined]
    assert told == {"max_length_q": 3, "max_length_k": 3, "dropout": 0.0}
