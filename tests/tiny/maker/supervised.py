"""Trains a tiny model on right and on deliberately faulty solutions, before reinforcement learning.

In: a model, its tokenizer and a way to draw dialogues. Out: the model, trained in place.
"""

import random
import time
from collections.abc import Callable

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

# A problem, and the parts of its response in their order, each with whether it is the policy's, which learns it.
Dialogue = tuple[str, list[tuple[str, bool]]]
# Draws one; clean: without the faults.
Draw = Callable[[random.Random, bool], Dialogue]

# Many small steps: 16 examples a step learn more per example than 64.
BATCH = 16
_MICRO_BATCHES = 2
_WARMUP_STEPS = 30
_IGNORED = -100  # the label that the cross-entropy leaves out


def sequence(tokenizer: Qwen2Tokenizer, problem: str, parts: list[tuple[str, bool]]) -> torch.Tensor:
    """Returns a dialogue as int64 [2, length]: token ids, and labels on the policy's tokens only."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem}], add_generation_prompt=True, return_dict=False
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
    num_targets = sum(int((one[1] != _IGNORED).sum()) for one in batch)
    batch = sorted(batch, key=lambda one: one.shape[1])
    total = 0.0
    for start in range(0, len(batch), len(batch) // _MICRO_BATCHES):
        rows = [one.T for one in batch[start : start + len(batch) // _MICRO_BATCHES]]
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


def train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    draw: Draw,
    *,
    steps: int,
    clean_share: float,
    peak_lr: float,
    muon: bool,
    seed: int,
) -> None:
    """Trains with linear warm-up and linear decay to zero, one fresh batch per step; the first `clean_share` of the
    steps on dialogues without faults."""
    rng = random.Random(seed)
    optimizers = make_optimizers(model, peak_lr, muon=muon)
    started = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        clean = step <= clean_share * steps
        loss = backward(model, [sequence(tokenizer, *draw(rng, clean)) for _ in range(BATCH)])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = min(step / _WARMUP_STEPS, (steps - step) / max(steps - _WARMUP_STEPS, 1))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * factor
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            print(f"step {step}/{steps} loss {loss:.4f} {time.monotonic() - started:.0f} s", flush=True)
