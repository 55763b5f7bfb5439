"""The shipped base models, the way they were made, their tokenizer, and the random model."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from dapo.config.compose import compose
from dapo.rewards.math import compute_score
from dapo.tiny.random_model import make_random_model
from dapo.tiny.tokenizer import ASSISTANT, END, FULL_VOCAB_SIZE, MIN_VOCAB_SIZE, PAD, USER, make_tokenizer, vocabulary
from dapo.turns.protocol import Generated
from dapo.turns.tool_use import rollout
from dapo.types import Sampling
from tests.support.fakes import make_prompt
from tests.tiny.maker.checked_sums import EASY_COUNTS, HARD_COUNT, carries, draw_prompt
from tests.tiny.maker.long_sums import DATA_SOURCE, draw_long_sum
from tests.tiny.maker.make_base import BASE_DIR, CHECKED_DIR, TOOL_DIR
from tests.tiny.maker.report import sample
from tests.tiny.maker.task import Addends, distinct_problems, problem_text


def loaded(folder: Path):
    """A shipped model, as small as it is meant to be, and its tokenizer."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM.from_pretrained(folder).eval()
    assert model.config.tie_word_embeddings and model.dtype == torch.float32
    assert (folder / "model.safetensors").stat().st_size <= 4_000_000
    return model, AutoTokenizer.from_pretrained(folder)


def test_the_base_adds_well_greedily_and_slips_at_temperature_one() -> None:
    model, tokenizer = loaded(BASE_DIR)
    assert 850_000 <= model.num_parameters() <= 1_000_000
    problems = distinct_problems("heldout", 48, seed=9)
    greedy = sample(model, tokenizer, problems, samples=1, greedy=True)
    sampled = sample(model, tokenizer, problems, samples=4)
    assert greedy.correct.mean() > 0.7
    assert 0.25 < sampled.correct.mean() < 0.65
    assert greedy.truncated.mean() == 0 and sampled.truncated.mean() < 0.02


@pytest.mark.nightly
def test_the_checked_base_solves_some_prompts_mostly_and_others_hardly_ever() -> None:
    model, tokenizer = loaded(CHECKED_DIR)
    problems = distinct_problems("heldout", 60, 9, draw_prompt)
    easy = [each for each in problems if len(each) in EASY_COUNTS and not carries(each)]
    hard = [each for each in problems if len(each) == HARD_COUNT][:13]  # they generate to their cap
    cap = compose([], "ablation/grpo").data.max_response_length
    right_easy, right_hard = (
        sample(model, tokenizer, chosen, samples=8, max_tokens=cap).correct for chosen in (easy, hard)
    )
    assert right_easy.mean() > 0.8 and right_hard.mean() < 0.1
    assert right_easy.all(axis=1).mean() > 0.2 and (~right_hard).all(axis=1).mean() > 0.6  # groups of 8


class Sampled:
    """A model as a policy, one response after the other."""

    def __init__(self, model: Qwen2ForCausalLM, tokenizer: Any, addends: Addends) -> None:
        self.model, self.tokenizer = model, tokenizer
        message = [{"role": "user", "content": problem_text(addends)}]
        self.ids = list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))

    async def __call__(self, token_ids: Sequence[int] = (), *, stop: str | None = None, **how: Any) -> Generated:
        ids = torch.tensor([[*self.ids, *token_ids]])
        how = {"do_sample": True, "top_p": 1.0, "top_k": 0, "max_new_tokens": 60, "tokenizer": self.tokenizer}
        self.ids = self.model.generate(ids, stop_strings=stop, **how)[0].tolist()
        said = self.ids[ids.shape[1] :]
        text = self.tokenizer.decode(said, skip_special_tokens=True)
        return Generated(token_ids=tuple(said), text=text, finish_reason="stop")


def test_the_tool_base_calls_seldom_and_is_mostly_wrong_and_hardly_ever_right_without_a_call() -> None:
    model, tokenizer = loaded(TOOL_DIR)
    sampling = Sampling(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=128)
    called, right = [], []
    for addends in distinct_problems("heldout", 40, 9, draw_long_sum):
        text = asyncio.run(rollout(make_prompt(0), Sampled(model, tokenizer, addends), sampling)).text
        called.append("<result>" in text)
        right.append(bool(compute_score(DATA_SOURCE, text, str(sum(addends)))["acc"]))
    assert 0.2 < sum(called) / 40 < 0.6
    assert 0.05 < sum(right) / 40 <= 0.3
    assert sum(ok and not call for ok, call in zip(right, called, strict=True)) <= 1


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


def test_the_tokenizer_has_one_token_per_character_and_gives_any_text_back(tmp_path: Path) -> None:
    small = AutoTokenizer.from_pretrained(make_random_model(tmp_path, layers=1))
    base = AutoTokenizer.from_pretrained(BASE_DIR)
    texts = ["37+5=42\nAnswer: 64", "  two  spaces \n\n and lines\n", " , . ! ? n't I'm 's  .", ""]
    for text in (*texts, "".join(map(chr, range(32, 127)))):
        for tokenizer in (small, base):
            ids = tokenizer.encode(text)
            assert len(ids) == len(text) and tokenizer.decode(ids) == text
            assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    other = "caf\u00e9 \u6f22\u5b57 \t\r\n \U0001f600"
    assert base.decode(base.encode(other)) == other
    for size in (MIN_VOCAB_SIZE, 110, FULL_VOCAB_SIZE, 300):
        tokens = vocabulary(size)
        assert len(tokens) == len(set(tokens)) == len(make_tokenizer(size)) == size


def test_the_chat_template_adds_three_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_DIR)
    messages = [{"role": "user", "content": "3+4="}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [USER, "3", "+", "4", "=", END, ASSISTANT]
    assert tokenizer.decode(ids) == f"{USER}3+4={END}{ASSISTANT}"
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
    with pytest.raises(Exception, match="unknown role tool; use system, user or assistant"):
        make_tokenizer().apply_chat_template([{"role": "tool", "content": "3"}])
