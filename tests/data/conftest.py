"""A tokenizer that the tests of prompts share."""

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; it adds a BOS of its own whenever special tokens are asked for, as Llama's does."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<end>", *map(chr, range(32, 127))])}
    model = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    model.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", bos_token="<bos>", eos_token="<end>")
    made.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m.role[0] }}:{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    return made
