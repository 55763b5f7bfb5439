"""What the fingerprint of a run's prompts depends on, and the date in a chat template."""

import copy
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dapo.data.prompts import fingerprint
from tests.data.test_order import prompts_of
from tests.data.test_prompts import KEY, row, write_jsonl
from tests.support.prompts import load_prompts


def test_fingerprint_depends_on_content_and_order(tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = prompts_of(2)
    assert fingerprint([first, second], tokenizer) == fingerprint(prompts_of(2), tokenizer)
    others = [[first, second], [second, first], [first], []]
    others += [
        [replace(first, ground_truth="2")],
        [replace(first, source="t")],
        [replace(first, messages=(("a", "b"),))],
    ]
    assert len({fingerprint(each, tokenizer) for each in others}) == len(others)


DATED = "{{ strftime_now('%d %b %Y') }} {% for m in messages %}{{ m.role[0] }}:{{ m.content }}<end>{% endfor %}"
# As Llama 3 has it: in a macro, behind a test for the function.
GUARDED = (
    "{% macro date() %}{{ strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' }}{% endmacro %}"
    "{{ date() }} {% for m in messages %}{{ m.role[0] }}:{{ m.content }}<end>{% endfor %}"
)


def with_template(tokenizer: PreTrainedTokenizerFast, template: Any) -> PreTrainedTokenizerFast:
    made = copy.deepcopy(tokenizer)
    made.chat_template = template
    return made


@pytest.mark.parametrize("template", [DATED, GUARDED, {"default": GUARDED, "tool_use": "{{ messages[0].content }}"}])
def test_a_template_writes_the_date_that_it_is_given(
    template: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A run that is continued after midnight trains on the same prompts."""
    dated, name = with_template(tokenizer, template), write_jsonl(tmp_path / "a.jsonl", [row("1+1")])
    first, again, real = [
        load_prompts([name], dated, max_prompt_length=100, max_contradictory=0.1, key=KEY, today=today)[0]
        for today in (datetime(2020, 2, 3, 23, 59), datetime(2020, 2, 3), None)
    ]
    assert first[0].text == again[0].text == "03 Feb 2020 u:1+1<end>"
    assert first[0].token_ids.tolist() == again[0].token_ids.tolist()
    assert real[0].text != first[0].text and datetime.now().strftime("%Y") in real[0].text
    assert fingerprint(first, dated) == fingerprint(real, dated), "and the date itself is no other data"


def test_a_template_without_a_date_is_rendered_as_ever(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    given: list[dict[str, Any]] = []
    plain = with_template(tokenizer, tokenizer.chat_template)
    apply = plain.apply_chat_template
    plain.apply_chat_template = lambda messages, **options: given.append(options) or apply(messages, **options)
    name = write_jsonl(tmp_path / "a.jsonl", [row("1+1")])
    load_prompts([name], plain, max_prompt_length=100, max_contradictory=0.1, key=KEY, today=datetime(2020, 2, 3))
    assert given == [{"tokenize": False, "add_generation_prompt": True}]


def test_fingerprint_depends_on_template_and_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<end>", *map(chr, range(126, 31, -1))])}
    model = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    other = PreTrainedTokenizerFast(tokenizer_object=model, chat_template=tokenizer.chat_template)
    tokenizers = [tokenizer, other, with_template(tokenizer, DATED), with_template(tokenizer, DATED + " ")]
    assert len({fingerprint(prompts_of(2), each) for each in tokenizers}) == len(tokenizers)
