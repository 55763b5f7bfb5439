"""The chat template: its arguments, its date, and the fingerprint of the prompts that it makes."""

import copy
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dapo.config.compose import compose
from dapo.config.schema import Config
from dapo.data.prompts import fingerprint
from dapo.data.sources import load_held_out, load_train
from dapo.state.changes import alters_meaning
from tests.data.test_order import prompts_of
from tests.data.test_prompts import KEY, row, write_jsonl
from tests.support.prompts import load_prompts


def test_fingerprint_depends_on_content_and_order(tokenizer):
    first, second = prompts_of(2)
    assert fingerprint([first, second], tokenizer) == fingerprint(prompts_of(2), tokenizer)
    others = [[first, second], [second, first], [first], []]
    changes = ({"ground_truth": "2"}, {"source": "t"}, {"messages": (("a", "b"),)})
    others += [[replace(first, **change)] for change in changes]
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
def test_a_template_writes_the_date_that_it_is_given(template, tmp_path, tokenizer):
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


def test_fingerprint_depends_on_template_and_vocabulary(tokenizer):
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<end>", *map(chr, range(126, 31, -1))])}
    model = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    other = PreTrainedTokenizerFast(tokenizer_object=model, chat_template=tokenizer.chat_template)
    tokenizers = [tokenizer, other, with_template(tokenizer, DATED), with_template(tokenizer, DATED + " ")]
    assert len({fingerprint(prompts_of(2), each) for each in tokenizers}) == len(tokenizers)


OFF = {"enable_thinking": False}
# As Qwen3 has it: thinking that is switched off is an empty thought at the beginning of the answer.
THINKING = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}a:"
    "{% if enable_thinking is defined and enable_thinking is false %}(no thought){% endif %}{% endif %}"
)


@pytest.fixture
def thinking(tokenizer):
    return with_template(tokenizer, THINKING)


def config(folder: Path, **given: object) -> Config:
    cfg = Config()
    cfg.data.train_files = [write_jsonl(folder / "a.jsonl", [row("1+1")])]
    cfg.data.val_files = {"held": [write_jsonl(folder / "b.jsonl", [row("2+2")])]}
    cfg.data.chat_template_kwargs = dict(given)
    return cfg


def test_prompts_of_training_and_evaluation_are_rendered_with_it(tmp_path, thinking):
    def texts(cfg: Config) -> list[str]:
        [train], _ = load_train(cfg, thinking)
        [held] = load_held_out(cfg, thinking)
        for prompt in (train, *held.prompts):
            assert prompt.token_ids.tolist() == thinking(prompt.text, add_special_tokens=False)["input_ids"]
        return [train.text, *(prompt.text for prompt in held.prompts)]

    assert texts(config(tmp_path)) == ["u:1+1<end>a:", "u:2+2<end>a:"]
    assert texts(config(tmp_path, **OFF)) == ["u:1+1<end>a:(no thought)", "u:2+2<end>a:(no thought)"]


def test_a_name_that_the_template_does_not_read_is_refused(tmp_path, thinking):
    """Jinja passes over it, and the policy would think all the same."""
    for load in (load_train, load_held_out):
        said = (
            r"`data.chat_template_kwargs.enable_thinkng` \(False\): .* reads no such name; did you mean `enable_think"
        )
        with pytest.raises(ValueError, match=said):
            load(config(tmp_path, enable_thinkng=False), thinking)


def test_other_values_are_other_prompts(thinking):
    """A run that goes on is refused with them, unless its person accepts it."""
    prompts = prompts_of(2)
    assert fingerprint(prompts, thinking) == fingerprint(prompts, thinking, {})
    found = {fingerprint(prompts, thinking, given) for given in ({}, OFF, {"enable_thinking": True})}
    assert len(found) == 3
    assert fingerprint(prompts, thinking, {"a": 1, "b": 2}) == fingerprint(prompts, thinking, {"b": 2, "a": 1})
    assert alters_meaning("data.chat_template_kwargs")


@pytest.mark.parametrize("name", ["messages", "chat_template"])
def test_what_dapo_itself_gives_is_refused(name):
    with pytest.raises(ValueError, match=rf"`data.chat_template_kwargs` .*'{name}'.* what dapo itself gives"):
        compose([f"data.chat_template_kwargs={{{name}: true}}"], "dapo_tiny")
    assert compose(["data.chat_template_kwargs={tools: []}"], "dapo_tiny").data.chat_template_kwargs == {"tools": []}
