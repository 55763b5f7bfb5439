"""Reports what a tiny model can do: samples of several responses per problem, and the accuracy and lengths they show.

In: a model, its tokenizer and problems. Out: a `Report`; the program prints it for a folder.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer

from tests.tiny.maker.make_data import NUM_VAL, VAL_SEED
from tests.tiny.maker.task import Addends, distinct_problems, is_correct, problem_text

MAX_RESPONSE_TOKENS = 128
_BATCH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Holds one array per quantity, [problems, samples]: verdicts, and response lengths in tokens with the stop."""

    correct: np.ndarray
    num_tokens: np.ndarray
    truncated: np.ndarray

    def mixed_share(self, group_size: int) -> float:
        """Returns the share of groups of `group_size` responses expected to hold a right and a wrong one.

        Exact for the samples at hand: all drawn without replacement from a problem's own k (k >= group_size).
        """
        samples = self.correct.shape[1]
        if samples < group_size:
            raise ValueError(f"`group_size` ({group_size}) exceeds the samples per problem ({samples}); sample more")
        right = self.correct.sum(axis=1)
        return float(
            1 - np.mean(_all_from(right, samples, group_size) + _all_from(samples - right, samples, group_size))
        )

    def summary(self) -> str:
        return (
            f"accuracy {self.correct.mean():.3f} ({self.correct.shape[0]} problems x {self.correct.shape[1]}), "
            f"tokens mean {self.num_tokens.mean():.1f} min {self.num_tokens.min()} max {self.num_tokens.max()}, "
            f"truncated at {MAX_RESPONSE_TOKENS}: {self.truncated.mean():.4f}"
        )


def _all_from(hits: np.ndarray, total: int, draws: int) -> np.ndarray:
    """Returns the probability that `draws` of `total`, without replacement, are all among the `hits`."""
    steps = np.arange(draws)
    return np.prod(np.clip(hits[:, None] - steps, 0, None) / (total - steps), axis=1)


def sample(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    problems: list[Addends],
    *,
    samples: int,
    greedy: bool = False,
    max_tokens: int = MAX_RESPONSE_TOKENS,
) -> Report:
    """Samples at temperature 1 and top_p 1 (or greedily) with the global torch generator."""
    tokenizer.padding_side = "left"
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem_text(addends)}], tokenize=False, add_generation_prompt=True
        )
        for addends in problems
        for _ in range(samples)
    ]
    texts: list[str] = []
    lengths: list[int] = []
    for start in range(0, len(prompts), _BATCH):
        inputs = tokenizer(prompts[start : start + _BATCH], return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            output = model.generate(
                **inputs,
                do_sample=not greedy,
                **({} if greedy else {"temperature": 1.0, "top_p": 1.0, "top_k": 0}),
                max_new_tokens=max_tokens,
            )
        responses = output[:, inputs["input_ids"].shape[1] :]
        stopped = (responses == tokenizer.eos_token_id).int()
        ends = torch.where(stopped.any(1), stopped.argmax(1) + 1, max_tokens + 1)
        lengths += ends.tolist()
        texts += tokenizer.batch_decode(responses, skip_special_tokens=True)
    verdicts = [is_correct(text, problems[index // samples]) for index, text in enumerate(texts)]
    shape = (len(problems), samples)
    num_tokens = np.array(lengths).reshape(shape)
    return Report(
        correct=np.array(verdicts).reshape(shape),
        num_tokens=np.minimum(num_tokens, max_tokens),
        truncated=num_tokens > max_tokens,
    )


def print_report(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, *, samples: int) -> None:
    """Prints held-out accuracy at temperature 1 and greedy, and how many groups of 16 would be mixed if samples
    allow.
    """
    model.eval()
    problems = distinct_problems("heldout", NUM_VAL, VAL_SEED)
    sampled = sample(model, tokenizer, problems, samples=samples)
    print(f"temperature 1: {sampled.summary()}")
    print(f"greedy:        {sample(model, tokenizer, problems, samples=1, greedy=True).summary()}")
    counts = np.array([len(addends) for addends in problems])
    print("by addends:    " + ", ".join(f"{k}: {sampled.correct[counts == k].mean():.2f}" for k in np.unique(counts)))
    if samples >= 16:
        print(f"mixed groups of 16: {sampled.mixed_share(16):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with model and tokenizer")
    parser.add_argument("--samples", type=int, default=4, help="responses per held-out problem")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    model = Qwen2ForCausalLM.from_pretrained(arguments.model)
    print_report(model, AutoTokenizer.from_pretrained(arguments.model), samples=arguments.samples)


if __name__ == "__main__":
    main()
