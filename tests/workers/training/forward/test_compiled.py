"""`actor.compile`: layers and passes over the logits, compiled, compute the same as without; on ranks: test_parity."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import varlen
from transformers import AutoModelForCausalLM

from dapo.config.actor import GRADIENT_CHECKPOINTING
from dapo.workers.training.forward import attention
from dapo.workers.training.forward.policy import MicroBatch, PackedPolicy, collate
from dapo.workers.training.forward.recompute import Compiled, checkpoint_activations
from tests.support.training.plain_reference import make_sequences

SHARED = ((11, 3), (11, 8), (11, 1), (11, 5))
MICRO_BATCHES = (((5, 9), (3, 1), (7, 14)), SHARED, ((9, 40),), ((30, 2), (2, 33), (4, 4)), (*SHARED, (12, 7)))


def policy(
    model: Path, mode: str, compiled: Compiled | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> PackedPolicy:
    plain = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, attn_implementation=attention.implementation("auto")
    )
    made = PackedPolicy(plain, 0.7, **options).train()
    if compiled is None:
        checkpoint_activations(plain, mode)
    else:
        made.compile_by(compiled, mode)
    return made


def gradient(policy: PackedPolicy, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Log-probabilities and entropies, the gradient of a loss of both, and the bytes kept for the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    policy.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, entropy, _ = policy(batch)
    (batch.weights * (batch.advantages * logprobs + 0.1 * entropy)).sum().backward()
    flat = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return torch.stack([logprobs, entropy]).detach(), flat, sum(kept.values())


@pytest.mark.nightly
def test_compiled_computes_the_same_for_any_micro_batch_and_compiles_once(model_dir: Path) -> None:
    """The compiler's own code generation, which takes long, is tested on ranks."""
    batches = [collate(make_sequences(model_dir, lengths), torch.device("cpu")) for lengths in MICRO_BATCHES]
    assert [batch.segments.prompts is not None for batch in batches] == [False, True, False, False, True]
    kept = {}
    for mode in GRADIENT_CHECKPOINTING:
        compiled = Compiled("aot_eager")
        ours, plain = (policy(model_dir, mode, how, entropy_gradient=True) for how in (compiled, None))
        graphs = []
        for batch in batches:
            found, wanted = gradient(ours, batch), gradient(plain, batch)
            torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
            assert (found[1] - wanted[1]).norm() <= 1e-5 * wanted[1].norm()
            graphs.append(counters["stats"]["unique_graphs"])
        assert not compiled.failure
        assert graphs[1:] == graphs[1:2] * 4, "once with shared prompts and once without"
        kept[mode] = found[2]
    assert kept["full"] < kept["selective"] < kept["none"]


@pytest.mark.nightly
def test_the_kernel_of_a_gpu_is_one_operation_of_the_layer(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with a kernel of the same signature in its place: the lengths of a micro-batch reach it, and selective
    checkpointing keeps what it returns."""
    calls: list[tuple[str, int, int]] = []

    def heads(x: torch.Tensor, times: int = 1) -> torch.Tensor:
        return x.transpose(0, 1).repeat_interleave(times, 0)[None].float().contiguous()

    def forward(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *others: Any) -> Any:
        calls.append(("forward", max_q, max_k))
        times, scale = q.shape[1] // k.shape[1], others[1]
        out = attention._segments_on_cpu(heads(q), heads(k, times), heads(v, times), cu_q, cu_k, scale)
        none = torch.zeros((2,), dtype=torch.uint64)
        return out[0].transpose(0, 1).to(q.dtype).contiguous(), torch.empty(q.shape[1], q.shape[0]), none

    def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_q: Any, cu_k: Any, *others: Any) -> Any:
        calls.append(("backward", others[0], others[1]))
        times, scale = q.shape[1] // k.shape[1], others[4]
        found = attention._segments_on_cpu_backward(
            heads(grad), heads(q), heads(k, times), heads(v, times), cu_q, cu_k, scale
        )
        shapes = zip(found, (1, times, times), strict=True)
        return tuple(
            x[0].unflatten(0, (-1, each)).sum(1).transpose(0, 1).to(q.dtype).contiguous() for x, each in shapes
        )

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    monkeypatch.setattr(attention, "_per_segment", attention._varlen)
    monkeypatch.setattr(attention, "_compiled_per_segment", attention._varlen)
    compiled = Compiled("aot_eager")
    ours, plain = (policy(model_dir, "selective", how, torch.bfloat16) for how in (compiled, None))
    for lengths in MICRO_BATCHES:
        batch = collate(make_sequences(model_dir, lengths), torch.device("cpu"))
        wanted = gradient(plain, batch)
        calls.clear()
        found = gradient(ours, batch)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
        # Shared prompts add up their gradients in another order, in bfloat16.
        assert (found[1] - wanted[1]).norm() <= (0.0 if batch.segments.prompts is None else 0.02) * wanted[1].norm()
        longest = batch.segments.longest, batch.segments.keys.longest
        assert calls == [("forward", *longest)] * 2 + [("backward", *longest)] * 2
    assert not compiled.failure


def test_what_cannot_be_compiled_is_computed_without(model_dir: Path) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    compiled = Compiled(broken)
    batch = collate(make_sequences(model_dir, MICRO_BATCHES[0]), torch.device("cpu"))
    found, wanted = (gradient(policy(model_dir, "selective", how), batch) for how in (compiled, None))
    assert "no compiler here" in compiled.failure
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert (found[1] - wanted[1]).norm() <= 1e-5 * wanted[1].norm()


@pytest.mark.parametrize(
    ("name", "capability", "installed", "kernel"),
    [
        ("auto", (9, 0), True, "FlashAttention-3"),
        ("auto", (9, 0), False, "FlashAttention-2"),
        ("auto", (8, 0), True, "FlashAttention-2"),
        ("fa2", (9, 0), True, "FlashAttention-2"),
        ("fa3", (9, 0), False, ""),
        ("fa3", (10, 0), True, ""),
        ("sdpa", (9, 0), True, ""),
    ],
)
def test_the_fastest_kernel_that_is_there(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], installed: bool, kernel: str
) -> None:
    activated: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(attention, "find_spec", lambda package: installed or None)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activated.append)
    if name == "fa3":
        with pytest.raises(ValueError, match=r"`model\.attn_implementation` \(fa3\) needs a Hopper GPU"):
            attention.choose_kernel(name, "cuda")
    else:
        assert attention.choose_kernel(name, "cuda") == kernel
    assert activated == (["FA3"] if kernel == "FlashAttention-3" else [])
    assert attention.choose_kernel(name, "cpu") == ""
