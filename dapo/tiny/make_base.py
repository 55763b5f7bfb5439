"""Makes the base models: `python -m dapo.tiny.make_base [base|verbose] [--out DIR] [--steps N] [--seed S]`.

Supervised training, first on right solutions, then on ones whose running sums are wrong on purpose at a fixed rate:
the model learns to add well and to slip at that rate, which leaves reinforcement learning something to remove. The
verbose model goes on from the base and learns to write half of its solutions out twice, which helps nothing: for the
same problem answers differ in length, so that a tight response cap has something to teach. Out: a model folder and
its report.
"""

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from dapo.tiny.model import make_model, save_model
from dapo.tiny.report import print_report
from dapo.tiny.task import draw_problem, problem_text, solution
from dapo.tiny.tokenizer import make_tokenizer

BASE_DIR = Path(__file__).parent / "base"
# 256 bytes and five turn markers, rounded up to a multiple of eight.
VOCAB_SIZE = 264
VERBOSE_DIR = Path(__file__).parent / "verbose"
ERROR_RATE = 0.3
# Many small steps: 16 examples a step learn more per example than 64.
_BATCH = 16
_MICRO_BATCHES = 2
_WARMUP_STEPS = 30
_INIT_STD = 0.06  # with the usual 0.02 a model this narrow needs three times the steps
_IGNORED = -100  # the label that the cross-entropy leaves out


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Describes a training. clean_share: part of the steps before the errors begin: right sums teach adding several
    times faster.

    verbose_share: of the solutions, written out twice.
    """

    steps: int
    clean_share: float
    verbose_share: float
    peak_lr: float


RECIPES = {
    "base": Recipe(steps=2600, clean_share=0.6, verbose_share=0.0, peak_lr=3e-3),
    "verbose": Recipe(steps=400, clean_share=0.0, verbose_share=0.5, peak_lr=1e-3),
}


def draw_batch(
    tokenizer: Qwen2Tokenizer, rng: random.Random, error_rate: float, verbose_share: float = 0.0
) -> list[torch.Tensor]:
    """Draws 16 sequences (int64, unequal lengths), stacked as [2, length]: token ids, and labels on response tokens
    only."""
    batch = []
    for _ in range(_BATCH):
        addends = draw_problem(rng, "base")
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem_text(addends)}], add_generation_prompt=True, return_dict=False
        )
        passes = 2 if verbose_share and rng.random() < verbose_share else 1  # no draw without verbosity
        response = [*tokenizer.encode(solution(addends, rng, error_rate, passes=passes)), tokenizer.eos_token_id]
        batch.append(torch.tensor([[*prompt, *response], [_IGNORED] * len(prompt) + response]))
    return batch


def backward(model: Qwen2ForCausalLM, batch: list[torch.Tensor]) -> float:
    """Adds the gradient of the batch's mean loss per response token; returns that loss.

    Sequences of like length share a micro-batch, which halves the padding. It is on the right, where causal attention
    needs no mask.
    """
    num_targets = sum(int((sequence[1] != _IGNORED).sum()) for sequence in batch)
    batch = sorted(batch, key=lambda sequence: sequence.shape[1])
    total = 0.0
    for start in range(0, _BATCH, _BATCH // _MICRO_BATCHES):
        rows = [sequence.T for sequence in batch[start : start + _BATCH // _MICRO_BATCHES]]
        ids, labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=_IGNORED).unbind(-1)
        hidden = model.model(input_ids=ids.clamp(min=0), use_cache=False).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        scored = targets != _IGNORED
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[scored]), targets[scored], reduction="sum")
        (loss / num_targets).backward()
        total += loss.item() / num_targets
    return total


def make_optimizers(model: Qwen2ForCausalLM, peak_lr: float) -> list[torch.optim.Optimizer]:
    """Makes Muon for the matrices, AdamW for the rest; at 800 clean steps a seventh of the loss of AdamW alone."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=peak_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, recipe: Recipe, *, steps: int, seed: int) -> None:
    """Trains with linear warm-up and linear decay to zero, one fresh batch of the `base` split per step."""
    rng = random.Random(seed)
    optimizers = make_optimizers(model, recipe.peak_lr)
    started = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        error_rate = 0.0 if step <= recipe.clean_share * steps else ERROR_RATE
        loss = backward(model, draw_batch(tokenizer, rng, error_rate, recipe.verbose_share))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = min(step / _WARMUP_STEPS, (steps - step) / max(steps - _WARMUP_STEPS, 1))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.peak_lr * factor
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            print(f"step {step}/{steps} loss {loss:.4f} {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=RECIPES, default="base", help="which of the two (default: base)")
    parser.add_argument("--out", type=Path, help="folder to write to (default: the package's own)")
    parser.add_argument("--steps", type=int, help="(default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Sums of floats depend on the number of threads: one, so that the result does not depend on the machine's cores.
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(VOCAB_SIZE)
    recipe = RECIPES[arguments.model]
    if arguments.model == "base":
        folder = arguments.out or BASE_DIR
        model = make_model(tokenizer, seed=arguments.seed, initializer_range=_INIT_STD)
    else:
        folder = arguments.out or VERBOSE_DIR
        model = Qwen2ForCausalLM.from_pretrained(BASE_DIR)
    train(model, tokenizer, recipe, steps=arguments.steps or recipe.steps, seed=arguments.seed)
    save_model(model, tokenizer, folder)
    weights = folder / "model.safetensors"
    print(f"{weights}: {model.num_parameters()} parameters, {weights.stat().st_size} bytes")
    print_report(model, tokenizer, samples=4)


if __name__ == "__main__":
    main()
