"""The tool task: its problems, its dialogues under the real calculator, and the base model as shipped."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from dapo.rewards.math import compute_score
from dapo.tiny.long_sums import CALL_RATE, DATA_SOURCE, ERROR_RATE, dialogue, draw_long_sum
from dapo.tiny.make_base import TOOL_DIR
from dapo.tiny.make_data import tables
from dapo.tiny.task import Addends, distinct_problems, problem_text, split_of
from dapo.tiny.tokenizer import make_tokenizer
from dapo.turns.protocol import Generate, Generated
from dapo.turns.tool_use import rollout
from dapo.types import Sampling
from tests.support.fakes import make_prompt

CAP = 128
SAMPLING = Sampling(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=CAP)
PROBLEMS = distinct_problems("heldout", 60, 9, draw_long_sum)


def answered(generate: Generate) -> str:
    """What the real function makes of a policy."""
    return asyncio.run(rollout(make_prompt(0), generate, SAMPLING)).text


def is_right(text: str, addends: Addends) -> bool:
    return bool(compute_score(DATA_SOURCE, text, str(sum(addends)))["acc"])


class Played:
    """A policy that says these parts, and is to be given the others."""

    tokenizer = make_tokenizer()

    def __init__(self, parts: list[tuple[str, bool]]) -> None:
        self.parts = list(parts)

    async def __call__(self, token_ids: Sequence[int] = (), **how: Any) -> Generated:
        if not self.parts[0][1]:
            assert self.tokenizer.decode(token_ids) == self.parts.pop(0)[0]
        text = self.parts.pop(0)[0]
        return Generated(token_ids=tuple(self.tokenizer.encode(text)), text=text, finish_reason="stop")


@pytest.mark.parametrize("seed", [None, 0])
def test_a_dialogue_is_what_the_calculator_makes_of_its_calls(seed: int | None) -> None:
    rng = None if seed is None else random.Random(seed)
    right = []
    for addends in PROBLEMS:
        parts = dialogue(addends, rng)
        assert answered(Played(parts)) == "".join(text for text, _ in parts)
        right.append(len(parts) > 1 and is_right(parts[0][0] + parts[-1][0], addends))
    assert all(right) if rng is None else 0 < sum(right) < len(right) / 2


def test_calls_and_mistakes_come_at_their_rates() -> None:
    rng = random.Random(1)
    calls = numbers = wrong = 0
    for _ in range(3000):
        addends = draw_long_sum(rng, "base")
        if len(parts := dialogue(addends, rng)) > 1:
            copied = [int(each) for each in parts[0][0][len("<calc>") : -len("</calc>")].split("+")]
            assert all(len(str(one)) == len(str(other)) for one, other in zip(copied, addends, strict=True))
            calls, numbers = calls + 1, numbers + len(addends)
            wrong += sum(one != other for one, other in zip(copied, addends, strict=True))
    assert calls / 3000 == pytest.approx(CALL_RATE, abs=0.03)
    assert wrong / numbers == pytest.approx(ERROR_RATE, abs=0.02)


def test_rows_are_long_sums_of_their_splits() -> None:
    for name, split in (("long_train.parquet", "rl"), ("long_val.parquet", "heldout")):
        for row in tables()[name]:
            addends = tuple(map(int, row["prompt"][0]["content"].removesuffix("=").split("+")))
            assert 3 <= len(addends) <= 5 and all(100 <= addend <= 9999 for addend in addends)
            assert split_of(addends) == split and row["reward_model"]["ground_truth"] == str(sum(addends))


class Sampled:
    """The shipped base as a policy, one response after the other."""

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


def test_the_shipped_base_calls_seldom_and_is_mostly_wrong_and_never_right_without_a_call() -> None:
    """Groups of 16 are mixed then, most of them."""
    torch.manual_seed(0)
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(TOOL_DIR).eval(), AutoTokenizer.from_pretrained(TOOL_DIR)
    assert (TOOL_DIR / "model.safetensors").stat().st_size <= 4_000_000
    texts = [answered(Sampled(model, tokenizer, addends)) for addends in PROBLEMS]
    right = [is_right(text, addends) for text, addends in zip(texts, PROBLEMS, strict=True)]
    called = ["<result>" in text for text in texts]
    assert 0.2 < sum(called) / len(texts) < 0.6
    assert 0.05 < sum(right) / len(right) <= 0.3
    assert sum(ok for ok, call in zip(right, called, strict=True) if not call) <= 1
