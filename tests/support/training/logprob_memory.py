"""Program for a test: `python logprob_memory.py TOKENS VOCABULARY HIDDEN` prints the bytes by which residence grew.

At its peak, over log-probabilities, entropy with its gradient and the backward pass; hidden states and head are there
before. The kernel's high-water mark is reset first, so that imports do not count.
"""

import sys
from pathlib import Path

import torch

from workers.training.forward.logprobs import token_logprobs

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def status(name: str) -> int:
    """Bytes."""
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def main() -> None:
    tokens, vocabulary, size = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = torch.nn.Linear(size, vocabulary, bias=False)
    hidden = torch.randn(tokens, size, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    CLEAR.write_text("5")
    before = status("VmRSS")
    logprobs, entropy = token_logprobs(hidden, head, labels, 0.7, vocabulary, entropy_gradient=True)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and head.weight.grad is not None
    print(status("VmHWM") - before)


if __name__ == "__main__":
    main()
