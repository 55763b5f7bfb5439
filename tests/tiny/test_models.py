"""The shipped base model, the way it was made, and the random model."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from dapo.tiny.make_base import BASE_DIR, CHECKED_DIR, VOCAB_SIZE, addition
from dapo.tiny.model import make_model
from dapo.tiny.random_model import make_random_model
from dapo.tiny.report import sample
from dapo.tiny.supervised import BATCH, backward, sequence, train
from dapo.tiny.task import distinct_problems
from dapo.tiny.tokenizer import make_tokenizer


def test_shipped_base_adds_well_greedily_and_slips_at_temperature_one() -> None:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM.from_pretrained(BASE_DIR).eval()
    tokenizer = AutoTokenizer.from_pretrained(BASE_DIR)
    problems = distinct_problems("heldout", 48, seed=9)
    greedy = sample(model, tokenizer, problems, samples=1, greedy=True)
    sampled = sample(model, tokenizer, problems, samples=4)
    assert greedy.correct.mean() > 0.7
    assert 0.25 < sampled.correct.mean() < 0.65
    assert greedy.truncated.mean() == 0 and sampled.truncated.mean() < 0.02


@pytest.mark.parametrize("folder", [pytest.param(BASE_DIR, id="base"), pytest.param(CHECKED_DIR, id="checked")])
def test_shipped_base_is_a_tied_qwen2_of_about_a_million_parameters(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, Qwen2ForCausalLM) and model.config.tie_word_embeddings
    assert model.dtype == torch.float32
    assert 850_000 <= model.num_parameters() <= 1_000_000


def test_training_lowers_the_loss_and_repeats_exactly() -> None:
    tokenizer = make_tokenizer(VOCAB_SIZE)
    models = [make_model(tokenizer, seed=0, layers=1, hidden=32, intermediate=64) for _ in range(2)]
    rng = random.Random(99)
    held_back = [sequence(tokenizer, *addition(rng, clean=True)) for _ in range(BATCH)]
    before = backward(models[0], held_back)
    models[0].zero_grad()
    for model in models:
        train(model, tokenizer, addition, steps=8, clean_share=0.5, peak_lr=3e-3, muon=True, seed=1)
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left, right)
    assert backward(models[0], held_back) < before


@pytest.mark.parametrize("tied", [pytest.param(True, id="tied"), pytest.param(False, id="untied")])
def test_random_model_stops_about_once_in_vocab_size_tokens(tied: bool, tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "m", tie_word_embeddings=tied, seed=3)
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer) == 110
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    ids = torch.randint(5, 110, (16, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        stop = model(ids).logits.softmax(-1)[..., tokenizer.eos_token_id]
    assert 70 < 1 / stop.mean().item() < 160


def test_random_model_refuses_sizes_that_do_not_divide(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`hidden` \(30\) must be a multiple of `heads` \(4\)"):
        make_random_model(tmp_path, hidden=30)
