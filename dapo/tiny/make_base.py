"""Makes the base model: `python -m dapo.tiny.make_base [--out DIR] [--steps N] [--seed S]`.

Supervised training, first on right solutions, then on ones whose running sums are wrong on purpose at a fixed rate:
the model learns to add well and to slip at that rate, which leaves reinforcement learning something to remove.
Out: a model folder and its report.
"""

import argparse
import random
import time
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
ERROR_RATE = 0.3
CLEAN_SHARE = 0.6  # of the steps, before the errors begin: adding is learnt several times faster from right sums
# Many small steps: 16 examples a step learn more per example than 64.
_BATCH = 16
_MICRO_BATCHES = 2
_PEAK_LR = 3e-3
_WARMUP_STEPS = 30
_INIT_STD = 0.06  # with the usual 0.02 a model this narrow needs three times the steps
_IGNORED = -100  # the label that the cross-entropy leaves out


def draw_batch(tokenizer: Qwen2Tokenizer, rng: random.Random, error_rate: float) -> list[torch.Tensor]:
    """16 sequences (int64, unequal lengths), stacked as [2, length]: token ids, and labels on response tokens only."""
    batch = []
    for _ in range(_BATCH):
        addends = draw_problem(rng, "base")
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem_text(addends)}], add_generation_prompt=True, return_dict=False
        )
        response = [*tokenizer.encode(solution(addends, rng, error_rate)), tokenizer.eos_token_id]
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


def make_optimizers(model: Qwen2ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest; at 800 clean steps a seventh of the loss of AdamW alone."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=_PEAK_LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=_PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, *, steps: int, seed: int) -> None:
    """Linear warm-up and linear decay to zero, one fresh batch of the `base` split per step."""
    rng = random.Random(seed)
    optimizers = make_optimizers(model)
    started = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        error_rate = 0.0 if step <= CLEAN_SHARE * steps else ERROR_RATE
        loss = backward(model, draw_batch(tokenizer, rng, error_rate))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = min(step / _WARMUP_STEPS, (steps - step) / max(steps - _WARMUP_STEPS, 1))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = _PEAK_LR * factor
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            print(f"step {step}/{steps} loss {loss:.4f} {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=BASE_DIR, help="folder to write to (default: the package's own)")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Sums of floats depend on the number of threads: one, so that the result does not depend on the machine's cores.
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(VOCAB_SIZE)
    model = make_model(tokenizer, seed=arguments.seed, initializer_range=_INIT_STD)
    train(model, tokenizer, steps=arguments.steps, seed=arguments.seed)
    save_model(model, tokenizer, arguments.out)
    weights = arguments.out / "model.safetensors"
    print(f"{weights}: {model.num_parameters()} parameters, {weights.stat().st_size} bytes")
    print_report(model, tokenizer, samples=4)


if __name__ == "__main__":
    main()
