"""Makes the base models: `python -m dapo.tiny.make_base [base|verbose|tool] [--out DIR] [--steps N] [--seed S]`.

Supervised training, first on right solutions, then on ones whose running sums are wrong on purpose at a fixed rate:
the model learns to add well and to slip at that rate, which leaves reinforcement learning something to remove. The
verbose model goes on from the base and learns to write half of its solutions out twice, which helps nothing: for the
same problem answers differ in length, so that a tight response cap has something to teach. The tool model learns the
long sums: to call a calculator, then to do so too seldom and with mistakes. Out: a model folder and its report.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from dapo.tiny.long_sums import dialogue, draw_long_sum
from dapo.tiny.model import make_model, save_model
from dapo.tiny.report import print_report
from dapo.tiny.task import Addends, draw_problem, problem_text, solution
from dapo.tiny.tokenizer import make_tokenizer

BASE_DIR = Path(__file__).parent / "base"
# 256 bytes and five turn markers, rounded up to a multiple of eight.
VOCAB_SIZE = 264
VERBOSE_DIR = Path(__file__).parent / "verbose"
TOOL_DIR = Path(__file__).parent / "tool"
FOLDERS = {"base": BASE_DIR, "verbose": VERBOSE_DIR, "tool": TOOL_DIR}
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

    verbose_share: of the solutions, written out twice. long_sums: with the calculator, instead of the addition task.
    muon: for the matrices, else AdamW for all. make: the model, of random weights.
    """

    steps: int
    clean_share: float
    verbose_share: float
    peak_lr: float
    long_sums: bool = False
    muon: bool = True
    make: Callable[..., Qwen2ForCausalLM] = make_model


# To copy is less than to add.
_SMALL = partial(make_model, layers=3, hidden=96, heads=3, key_value_heads=1, intermediate=256)
RECIPES = {
    "base": Recipe(steps=2600, clean_share=0.6, verbose_share=0.0, peak_lr=3e-3),
    "verbose": Recipe(steps=400, clean_share=0.0, verbose_share=0.5, peak_lr=1e-3),
    "tool": Recipe(
        steps=900, clean_share=0.75, verbose_share=0.0, peak_lr=3e-3, long_sums=True, muon=False, make=_SMALL
    ),
}


def draw_batch(
    tokenizer: Qwen2Tokenizer, rng: random.Random, error_rate: float, verbose_share: float = 0.0
) -> list[torch.Tensor]:
    """Draws 16 sequences (int64, unequal lengths), stacked as [2, length]: token ids, and labels on response tokens
    only."""
    batch = []
    for _ in range(_BATCH):
        addends = draw_problem(rng, "base")
        passes = 2 if verbose_share and rng.random() < verbose_share else 1  # no draw without verbosity
        batch.append(_sequence(tokenizer, addends, [(solution(addends, rng, error_rate, passes=passes), True)]))
    return batch


def draw_dialogues(tokenizer: Qwen2Tokenizer, rng: random.Random, *, clean: bool) -> list[torch.Tensor]:
    """Draws 16 sequences of long sums as `draw_batch` does; there are no labels on what the tool says."""
    problems = [draw_long_sum(rng, "base") for _ in range(_BATCH)]
    return [_sequence(tokenizer, each, dialogue(each, None if clean else rng)) for each in problems]


def _sequence(tokenizer: Qwen2Tokenizer, addends: Addends, parts: list[tuple[str, bool]]) -> torch.Tensor:
    """Stacks token ids and labels of a problem and the parts of its response, each with whether it has labels."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem_text(addends)}], add_generation_prompt=True, return_dict=False
    )
    ids, labels = [*prompt], [_IGNORED] * len(prompt)
    for text, own in [*parts, (tokenizer.eos_token, True)]:
        tokens = tokenizer.encode(text)
        ids += tokens
        labels += tokens if own else [_IGNORED] * len(tokens)
    return torch.tensor([ids, labels])


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


def make_optimizers(model: Qwen2ForCausalLM, peak_lr: float, *, muon: bool = True) -> list[torch.optim.Optimizer]:
    """Makes Muon for the matrices, AdamW for the rest; at 800 clean steps a seventh of the loss of AdamW alone. Without
    `muon`, AdamW for all: for a smaller model a step takes a third of the time."""
    is_matrix = {name: muon and p.ndim == 2 and "embed" not in name for name, p in model.named_parameters()}
    matrices = [p for name, p in model.named_parameters() if is_matrix[name]]
    others = [p for name, p in model.named_parameters() if not is_matrix[name]]
    adamw = torch.optim.AdamW(others, lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.0)
    if not matrices:
        return [adamw]
    return [torch.optim.Muon(matrices, lr=peak_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"), adamw]


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, recipe: Recipe, *, steps: int, seed: int) -> None:
    """Trains with linear warm-up and linear decay to zero, one fresh batch of the `base` split per step."""
    rng = random.Random(seed)
    optimizers = make_optimizers(model, recipe.peak_lr, muon=recipe.muon)
    started = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        clean = step <= recipe.clean_share * steps
        if recipe.long_sums:
            batch = draw_dialogues(tokenizer, rng, clean=clean)
        else:
            batch = draw_batch(tokenizer, rng, 0.0 if clean else ERROR_RATE, recipe.verbose_share)
        loss = backward(model, batch)
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
    parser.add_argument("model", nargs="?", choices=RECIPES, default="base", help="which of them (default: base)")
    parser.add_argument("--out", type=Path, help="folder to write to (default: the package's own)")
    parser.add_argument("--steps", type=int, help="(default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Sums of floats depend on the number of threads: one, so that the result does not depend on the machine's cores.
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(VOCAB_SIZE)
    recipe = RECIPES[arguments.model]
    folder = arguments.out or FOLDERS[arguments.model]
    if arguments.model == "verbose":
        model = Qwen2ForCausalLM.from_pretrained(BASE_DIR)
    else:
        model = recipe.make(tokenizer, seed=arguments.seed, initializer_range=_INIT_STD)
    train(model, tokenizer, recipe, steps=arguments.steps or recipe.steps, seed=arguments.seed)
    save_model(model, tokenizer, folder)
    weights = folder / "model.safetensors"
    print(f"{weights}: {model.num_parameters()} parameters, {weights.stat().st_size} bytes")
    if not recipe.long_sums:  # else it needs its tool, in `python -m dapo.evaluate`
        print_report(model, tokenizer, samples=4)


if __name__ == "__main__":
    main()
