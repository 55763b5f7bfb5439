"""The character tokenizer, made and as loaded from a saved model."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dapo.tiny.make_base import BASE_DIR
from dapo.tiny.random_model import make_random_model
from dapo.tiny.tokenizer import ASSISTANT, END, FULL_VOCAB_SIZE, MIN_VOCAB_SIZE, PAD, USER, make_tokenizer, vocabulary

ASCII_TEXTS = [
    pytest.param("37+5=42\n42+18=60\n60+4=64\nAnswer: 64", id="solution"),
    pytest.param("  two  spaces \n\n and lines\n", id="whitespace"),
    pytest.param(" , . ! ? n't I'm 's  .", id="what-clean-up-would-change"),
    pytest.param("".join(map(chr, range(32, 127))), id="printable"),
    pytest.param("", id="empty"),
]


@pytest.mark.parametrize("text", ASCII_TEXTS)
def test_round_trip_one_token_per_character(text: str, tmp_path: Path) -> None:
    small = AutoTokenizer.from_pretrained(make_random_model(tmp_path, layers=1))
    for tokenizer in (small, AutoTokenizer.from_pretrained(BASE_DIR)):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_base_tokenizer_takes_any_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_DIR)
    text = "caf\u00e9 \u6f22\u5b57 \t\r\n \U0001f600"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_adds_three_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_DIR)
    messages = [{"role": "user", "content": "3+4="}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [USER, "3", "+", "4", "=", END, ASSISTANT]
    assert tokenizer.decode(ids) == f"{USER}3+4={END}{ASSISTANT}"
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)


def test_chat_template_refuses_an_unknown_role() -> None:
    with pytest.raises(Exception, match="unknown role tool; use system, user or assistant"):
        make_tokenizer().apply_chat_template([{"role": "tool", "content": "3"}])


@pytest.mark.parametrize("size", [MIN_VOCAB_SIZE, 110, FULL_VOCAB_SIZE, 300])
def test_vocabulary_has_its_size_and_no_repeats(size: int) -> None:
    tokens = vocabulary(size)
    assert len(tokens) == len(set(tokens)) == size
    assert len(make_tokenizer(size)) == size


def test_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`vocab_size` \(50\) must be at least"):
        make_tokenizer(50)
