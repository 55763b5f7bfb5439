"""What a person gives the chat template beside messages, `data.chat_template_kwargs`, and where it holds."""

import copy
import inspect
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dapo.config.compose import compose
from dapo.config.sampling import OWN_TEMPLATE_KWARGS
from dapo.config.schema import Config
from dapo.data.prompts import fingerprint
from dapo.data.sources import load_held_out, load_train
from dapo.state.changes import alters_meaning
from tests.data.test_order import prompts_of
from tests.data.test_prompts import row, write_jsonl

OFF = {"enable_thinking": False}
# As Qwen3 has it: thinking that is switched off is an empty thought at the beginning of the answer.
THINKING = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}a:"
    "{% if enable_thinking is defined and enable_thinking is false %}(no thought){% endif %}{% endif %}"
)


@pytest.fixture
def thinking(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    made = copy.deepcopy(tokenizer)
    made.chat_template = THINKING
    return made


def config(folder: Path, **given: object) -> Config:
    cfg = Config()
    cfg.data.train_files = [write_jsonl(folder / "a.jsonl", [row("1+1")])]
    cfg.data.val_files = {"held": [write_jsonl(folder / "b.jsonl", [row("2+2")])]}
    cfg.data.chat_template_kwargs = dict(given)
    return cfg


def test_prompts_of_training_and_evaluation_are_rendered_with_it(
    tmp_path: Path, thinking: PreTrainedTokenizerFast
) -> None:
    def texts(cfg: Config) -> list[str]:
        [train], _ = load_train(cfg, thinking)
        [held] = load_held_out(cfg, thinking)
        for prompt in (train, *held.prompts):
            assert prompt.token_ids.tolist() == thinking(prompt.text, add_special_tokens=False)["input_ids"]
        return [train.text, *(prompt.text for prompt in held.prompts)]

    assert texts(config(tmp_path)) == ["u:1+1<end>a:", "u:2+2<end>a:"]
    assert texts(config(tmp_path, **OFF)) == ["u:1+1<end>a:(no thought)", "u:2+2<end>a:(no thought)"]


def test_entries_of_sources_are_rendered_with_it(tmp_path: Path, thinking: PreTrainedTokenizerFast) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [row("1+1")])
    cfg = compose(
        [f"data.sources=[{{name: one, files: ['{file}']}}]", "data.train_files=[]", "data.val_files=[]"]
        + ["data.chat_template_kwargs.enable_thinking=false"],
        "dapo_tiny",
    )
    assert load_train(cfg, thinking)[0][0].text == "u:1+1<end>a:(no thought)"


def test_a_name_that_the_template_does_not_read_is_refused(tmp_path: Path, thinking: PreTrainedTokenizerFast) -> None:
    """Jinja passes over it, and the policy would think all the same."""
    for load in (load_train, load_held_out):
        with pytest.raises(
            ValueError,
            match=r"`data.chat_template_kwargs.enable_thinkng` \(False\): the chat template of `model.path` reads no "
            "such name; did you mean `enable_thinking`",
        ):
            load(config(tmp_path, enable_thinkng=False), thinking)


def test_other_values_are_other_prompts(thinking: PreTrainedTokenizerFast) -> None:
    """A run that goes on is refused with them, unless its person accepts it."""
    prompts = prompts_of(2)
    assert fingerprint(prompts, thinking) == fingerprint(prompts, thinking, {})
    found = {fingerprint(prompts, thinking, given) for given in ({}, OFF, {"enable_thinking": True})}
    assert len(found) == 3
    assert fingerprint(prompts, thinking, {"a": 1, "b": 2}) == fingerprint(prompts, thinking, {"b": 2, "a": 1})
    assert alters_meaning("data.chat_template_kwargs")


@pytest.mark.parametrize("name", ["messages", "tokenize", "add_generation_prompt", "chat_template"])
def test_what_dapo_itself_gives_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"`data.chat_template_kwargs` .*'{name}'.* what dapo itself gives"):
        compose([f"data.chat_template_kwargs={{{name}: true}}"], "dapo_tiny")
    assert compose(["data.chat_template_kwargs={tools: []}"], "dapo_tiny").data.chat_template_kwargs == {"tools": []}


def test_all_that_is_no_matter_of_the_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    """Tools and documents alone, of what transformers' function takes, reach the template."""
    takes = inspect.signature(tokenizer.apply_chat_template).parameters
    assert {*takes} - {"tools", "documents", "kwargs"} == {*OWN_TEMPLATE_KWARGS} - {"messages"}


@pytest.mark.parametrize(
    "name",
    ["data.apply_chat_template_kwargs", "data.apply_chat_template_kwargs.enable_thinking", "chat_template_kwargs"],
)
def test_the_names_of_others_lead_to_it(name: str) -> None:
    with pytest.raises(ValueError, match=r"here it is `data.chat_template_kwargs"):
        compose([f"+{name}=1"], "dapo_tiny")
