"""Makes the base models: `python -m tests.tiny.maker.make_base [base|tool|checked] [--out DIR] [--steps N]`.

Supervised training, first on right solutions, then on ones whose running sums are wrong on purpose at a fixed rate:
the model learns to add well and to slip at that rate, which leaves reinforcement learning something to remove. The tool
model learns the long sums: to call a calculator, then to do so too seldom and with mistakes. The checked model goes on
from the base and learns to add up to fourteen numbers, to slip, and to check at times. Out: a model folder, its report.
"""

import argparse
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from dapo.tiny import FOLDER
from dapo.tiny.model import make_model, save_model
from dapo.tiny.tokenizer import make_tokenizer
from tests.tiny.maker.checked_sums import checked_solution, draw_checked_sum
from tests.tiny.maker.long_sums import dialogue, draw_long_sum
from tests.tiny.maker.report import print_report
from tests.tiny.maker.supervised import Dialogue, Draw, train
from tests.tiny.maker.task import draw_problem, problem_text, solution

BASE_DIR = FOLDER / "base"
# 256 bytes and five turn markers, rounded up to a multiple of eight.
VOCAB_SIZE = 264
TOOL_DIR, CHECKED_DIR = FOLDER / "tool", FOLDER / "checked"
ERROR_RATE = 0.3
# To copy is less than to add.
_make_small = partial(make_model, layers=3, hidden=96, heads=3, key_value_heads=1, intermediate=256)
_INIT_STD = 0.06  # with the usual 0.02 a model this narrow needs three times the steps


def addition(rng: random.Random, clean: bool) -> Dialogue:
    """Draws a problem of the addition task."""
    addends = draw_problem(rng, "base")
    return problem_text(addends), [(solution(addends, rng, 0.0 if clean else ERROR_RATE), True)]


def long_sum(rng: random.Random, clean: bool) -> Dialogue:
    """Draws a long sum, with the calculator."""
    addends = draw_long_sum(rng, "base")
    return problem_text(addends), dialogue(addends, None if clean else rng)


def checked_sum(rng: random.Random, clean: bool) -> Dialogue:
    """Draws a sum that is checked at times."""
    addends = draw_checked_sum(rng, "base")
    return problem_text(addends), [(checked_solution(addends, rng, slips=not clean), True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Describes a training. clean_share: part of the steps before the faults begin: right sums teach adding several
    times faster.

    muon: for the matrices, else AdamW for all. small: a third of the parameters. go_on: from the base, instead of
    random weights. adds: the report of the addition task applies.
    """

    folder: Path
    draw: Draw
    steps: int
    clean_share: float
    peak_lr: float
    muon: bool = True
    small: bool = False
    go_on: bool = False
    adds: bool = False

    def model(self, tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
        """Makes what training begins with."""
        if self.go_on:
            return Qwen2ForCausalLM.from_pretrained(BASE_DIR)
        make = _make_small if self.small else make_model
        return make(tokenizer, seed=seed, initializer_range=_INIT_STD)


RECIPES = {
    "base": Recipe(folder=BASE_DIR, draw=addition, steps=2600, clean_share=0.6, peak_lr=3e-3, adds=True),
    "tool": Recipe(folder=TOOL_DIR, draw=long_sum, steps=3000, clean_share=0.85, peak_lr=3e-3, muon=False, small=True),
    "checked": Recipe(folder=CHECKED_DIR, draw=checked_sum, steps=900, clean_share=0.7, peak_lr=2e-3, go_on=True),
}


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
    folder = arguments.out or recipe.folder
    model = recipe.model(tokenizer, arguments.seed)
    train(
        model,
        tokenizer,
        recipe.draw,
        steps=arguments.steps or recipe.steps,
        clean_share=recipe.clean_share,
        peak_lr=recipe.peak_lr,
        muon=recipe.muon,
        seed=arguments.seed,
    )
    save_model(model, tokenizer, folder)
    weights = folder / "model.safetensors"
    print(f"{weights}: {model.num_parameters()} parameters, {weights.stat().st_size} bytes")
    if recipe.adds:  # `python -m dapo.evaluate` reports on the others
        print_report(model, tokenizer, samples=4)


if __name__ == "__main__":
    main()
