"""Activation bytes of the planner against torch's own record of every allocation, on one Qwen2 layer more or less."""

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from dapo.config.facts.model_shape import shape_of
from dapo.tools.plan.actor import Activations
from dapo.workers.training.forward.attention import PACKED_ATTENTION, Segments
from dapo.workers.training.forward.recompute import checkpoint_activations

CONFIG = {"hidden_size": 128, "intermediate_size": 704, "num_hidden_layers": 3, "vocab_size": 264}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 192, "head_dim": 32}
LENGTHS = (100, 60, 96)
TOKENS = sum(LENGTHS)


def allocated(function):
    """(result, bytes alive afterwards, bytes alive at the peak), both beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = function()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return result, int(alive[-1]), int(alive.max())


def measured(dtype, mode, layers, kind="qwen2"):
    """Bytes per token after the forward pass, and at the peak of forward and backward together."""
    config = AutoConfig.for_model(kind, **CONFIG | EXPERTS | {"num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION).to(dtype).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    checkpoint_activations(model, mode)
    bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32))
    inputs = {
        "input_ids": torch.zeros(1, TOKENS, dtype=torch.long),
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "segments": Segments(LENGTHS, bounds),
    }

    def forward():
        return model.model(**inputs, attention_mask=None, use_cache=False).last_hidden_state

    forward().sum().backward()  # warm: threads' scratch memory
    out, kept, peak = allocated(forward)
    _, _, backward_peak = allocated(lambda: out.backward(torch.ones_like(out)))
    return kept / TOKENS, max(peak, kept + backward_peak) / TOKENS


def predicted(dtype_bytes, mode, cuda=False, kind="qwen2"):
    shape = shape_of(CONFIG | EXPERTS | {"model_type": kind}, "m")
    return Activations(shape=shape, element=dtype_bytes, checkpointing=mode, cuda=cuda)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(("dtype", "element"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_per_token(dtype, element, mode, kind):
    activations, experts = predicted(element, mode, kind=kind), kind != "qwen2"
    (one, _), (three, peak) = measured(dtype, mode, 1, kind), measured(dtype, mode, 3, kind)
    assert (three - one) / 2 == pytest.approx(activations.kept, rel=1e-4 if experts else 0)  # a number for each expert
    [kept, working] = activations.terms_of_layers(TOKENS)
    # Without recomputation the final norm's own backward pass can be a little fuller than the last layer's.
    within = 0.05 if experts or mode == "none" else 0.01
    assert (kept.amount + working.amount) / TOKENS == pytest.approx(peak, rel=within)


class _Kernel(torch.autograd.Function):
    """What a variable-length kernel keeps: queries, shared keys and values, output and log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, _, _ = ctx.saved_tensors
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def test_bytes_per_token_with_a_kernel_like_that_of_a_gpu(monkeypatch):
    def kernel(query, key, value, **_):
        q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
        return _Kernel.apply(q, k, v).unsqueeze(0)

    monkeypatch.setattr("dapo.workers.training.forward.attention._per_segment", kernel)
    (one, _), (three, _) = measured(torch.bfloat16, "none", 1), measured(torch.bfloat16, "none", 3)
    assert (three - one) / 2 == predicted(2, "none", cuda=True).kept


def test_attention_that_is_shared_copies_the_output_and_few_keys():
    shape = shape_of(CONFIG | {"model_type": "qwen2"}, "m")
    alone = Activations(shape=shape, element=2, checkpointing="none")
    shared = Activations(shape=shape, element=2, checkpointing="none", shared_by=4)
    assert shared.attention - alone.attention == 2 * shape.attention_size + 2 * 2 * 2 * shape.head_dim
