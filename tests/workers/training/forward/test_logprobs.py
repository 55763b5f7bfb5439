"""Chunked log-probabilities and entropy against plain autograd over whole logits, and their memory."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import dapo.workers.training.forward.logprobs
from dapo.workers.training.forward.logprobs import token_logprobs

ROWS, HIDDEN, VOCABULARY = 33, 12, 101


def chunk_of(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setitem(dapo.workers.training.forward.logprobs.LOGITS_CHUNK_ELEMENTS, "cpu", elements)


def plain(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    temperature: float,
    vocabulary: int,
    support: Tensor | None = None,
    *,
    truncated: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    logits = head(hidden)[:, :vocabulary]
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if support is not None and truncated:
        kept = torch.stack([torch.isin(torch.arange(vocabulary), row) for row in support])
        scaled = scaled.masked_fill(~kept, -1e9)
    distribution = scaled.log_softmax(-1)
    own, entropy = distribution.gather(1, labels[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)
    if support is None:
        return own, entropy, None
    likely = [[distribution[row, token] * (token >= 0) for token in ids] for row, ids in enumerate(support.tolist())]
    return own, entropy, torch.stack([torch.stack(row) for row in likely])


def some_support(labels: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Between one token, the label, and `most` of the vocabulary, in any order, padded by -1."""
    rows = []
    for label in labels.tolist():
        count = int(torch.randint(1, most + 1, (), generator=generator))
        others = [token for token in torch.randperm(VOCABULARY, generator=generator).tolist() if token != label]
        ids = torch.tensor([label, *others[: count - 1]])
        rows.append(ids[torch.randperm(count, generator=generator)])
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).int()


class Tied(nn.Module):
    """An embedding, a nonlinear body and a head; the smallest model in which the two matrices can be one."""

    def __init__(self, *, tied: bool, bias: bool, padding: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY + padding, HIDDEN, dtype=dtype)
        self.body = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        self.head = nn.Linear(HIDDEN, VOCABULARY + padding, bias=bias, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.body(self.embedding(tokens)))


@dataclass(frozen=True)
class Case:
    """most: tokens of the support of a position, 0 without one. truncated: whether only those could be sampled."""

    temperature: float = 1.0
    entropy_gradient: bool = False
    most: int = 0
    truncated: bool = False


def results(model: Tied, chunked: bool, case: Case) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probabilities, entropy and log-probabilities of the support; and the gradients of one loss over them."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, VOCABULARY, (2, ROWS), generator=generator)
    weights, others = torch.randn(2, ROWS, generator=generator, dtype=torch.float64).to(torch.float32)
    support = some_support(labels, case.most, generator) if case.most else None
    options: dict[str, Any] = {"support": support, "truncated": case.truncated}
    model.zero_grad()
    if chunked:
        options["entropy_gradient"] = case.entropy_gradient
    function = token_logprobs if chunked else plain
    found = function(model.hidden(tokens), model.head, labels, case.temperature, VOCABULARY, **options)
    logprobs, entropy, of_support = found
    if chunked:
        assert entropy.requires_grad == case.entropy_gradient
        assert logprobs._base is None and entropy._base is None  # FSDP loses its backward hook on views
    loss = (weights * logprobs).sum()
    if case.entropy_gradient:
        loss = loss + (others * entropy).sum()
    if of_support is not None:
        loss = loss + (torch.randn(of_support.shape, generator=generator) * of_support).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [one.detach() for one in found if one is not None], gradients


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


CASES = {
    "plain": Case(),
    "bonus": Case(entropy_gradient=True),
    "temperature_bonus": Case(temperature=0.7, entropy_gradient=True),
    "temperature": Case(temperature=0.7),
    "one_token": Case(temperature=0.7, most=1, truncated=True),
    "truncated": Case(temperature=0.7, most=9, truncated=True),
    "truncated_bonus": Case(temperature=0.7, entropy_gradient=True, most=9, truncated=True),
    "truncated_nothing": Case(entropy_gradient=True, most=VOCABULARY, truncated=True),
    "most_likely": Case(temperature=0.7, most=9),
    "most_likely_bonus": Case(entropy_gradient=True, most=9),
}


@pytest.mark.parametrize("elements", [1, 5 * VOCABULARY, 1 << 24], ids=["row", "chunks", "whole"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("bias", "padding"), [(False, 0), (True, 7)], ids=["plain", "bias-and-padding"])
def test_values_and_gradients_are_those_of_whole_logits(
    monkeypatch: pytest.MonkeyPatch, elements: int, case: Case, tied: bool, bias: bool, padding: int
) -> None:
    chunk_of(monkeypatch, elements)
    torch.manual_seed(1)
    model = Tied(tied=tied, bias=bias, padding=padding, dtype=torch.float32)
    found, gradients = results(model, True, case)
    values, wanted = results(model, False, case)
    for one, other in zip(found, values, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradients[name].isfinite().all()
        if case.most == 1:  # the one token is certain: nothing moves its probability
            assert not gradient.any() and gradients[name].abs().max() < 1e-5
        else:
            assert distance(gradients[name], gradient) < 1e-5, name


def test_extreme_logits_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_of(monkeypatch, 2 * VOCABULARY)
    head = nn.Linear(2, VOCABULARY, bias=False)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[3] = torch.tensor([300.0, 0.0])
    hidden = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], requires_grad=True)
    logprobs, entropy, _ = token_logprobs(hidden, head, torch.tensor([3, 4, 3]), 0.5, VOCABULARY, entropy_gradient=True)
    uniform = float(torch.tensor(VOCABULARY - 1.0).log())
    torch.testing.assert_close(logprobs, torch.tensor([0.0, -600.0, -600.0 - uniform]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 0.0, uniform]))
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_in_bfloat16_the_weight_gradient_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 chunks of one row: a running sum in bfloat16 would lose most of the small terms."""
    torch.manual_seed(3)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.bfloat16)
    hidden, labels = torch.randn(600, HIDDEN, dtype=torch.bfloat16), torch.randint(0, VOCABULARY, (600,))
    gradients = []
    for elements in (1, 1 << 24):
        chunk_of(monkeypatch, elements)
        x = hidden.clone().requires_grad_()
        logprobs, entropy, _ = token_logprobs(x, head, labels, 1.0, VOCABULARY)
        assert logprobs.dtype == entropy.dtype == torch.float32
        logprobs.sum().backward()
        assert x.grad is not None and x.grad.dtype is torch.bfloat16
        assert head.weight.grad is not None and head.weight.grad.dtype is torch.bfloat16
        gradients += [head.weight.grad]
        head.weight.grad = None
    exact = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    exact.weight.data.copy_(head.weight.data)
    plain(hidden.float(), exact, labels, 1.0, VOCABULARY)[0].sum().backward()
    assert exact.weight.grad is not None
    by_row, whole = (distance(gradient, exact.weight.grad) for gradient in gradients)
    assert by_row < 1.5 * whole < 0.01


@pytest.mark.parametrize("elements", [5 * VOCABULARY, 1 << 24], ids=["chunks", "whole"])
@pytest.mark.parametrize(("bias", "padding"), [(False, 0), (True, 7)], ids=["plain", "bias-and-padding"])
def test_logits_in_float32_are_not_rounded_to_bfloat16(
    monkeypatch: pytest.MonkeyPatch, elements: int, bias: bool, padding: int
) -> None:
    """Logits of about 10, where a step of bfloat16 is 0.06; against float64."""
    chunk_of(monkeypatch, elements)
    torch.manual_seed(5)
    head = nn.Linear(HIDDEN, VOCABULARY + padding, bias=bias, dtype=torch.bfloat16)
    head.weight.data.normal_()
    exact = nn.Linear(HIDDEN, VOCABULARY + padding, bias=bias, dtype=torch.float64)
    exact.load_state_dict(head.state_dict())
    hidden, labels = 3 * torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16), torch.randint(0, VOCABULARY, (ROWS,))
    weights, others = torch.randn(2, ROWS)

    def gradients(head: nn.Module, x: Tensor, logprobs: Tensor, entropy: Tensor) -> list[Tensor]:
        head.zero_grad()
        ((weights * logprobs).sum() + (others * entropy).sum()).backward()
        return [grad for grad in (x.grad, *(p.grad for p in head.parameters())) if grad is not None]

    y = hidden.double().requires_grad_()
    wanted = plain(y, exact, labels, 0.7, VOCABULARY)[:2]
    wanted_gradients = gradients(exact, y, *wanted)
    errors = {}
    for float32_logits in (False, True):
        x = hidden.clone().requires_grad_()
        options = {"entropy_gradient": True, "float32_logits": float32_logits}
        found = token_logprobs(x, head, labels, 0.7, VOCABULARY, **options)[:2]
        assert found[0].dtype == found[1].dtype == torch.float32
        own = gradients(head, x, *found)
        assert [grad.dtype for grad in own] == [torch.bfloat16] * len(wanted_gradients)
        values = max(float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True))
        errors[float32_logits] = values, max(map(distance, own, wanted_gradients))
    assert errors[True][0] < 1e-4 < 1e-2 < errors[False][0]
    assert errors[True][1] < 4e-3 and errors[False][1] > 2 * errors[True][1]


def test_logits_in_float32_change_nothing_in_float32() -> None:
    torch.manual_seed(6)
    head, hidden, labels = nn.Linear(HIDDEN, VOCABULARY), torch.randn(ROWS, HIDDEN), torch.arange(ROWS)
    both = [token_logprobs(hidden, head, labels, 0.7, VOCABULARY, float32_logits=flag)[0] for flag in (False, True)]
    assert torch.equal(*both)


def test_a_frozen_head_gets_no_gradient_and_without_any_nothing_is_kept() -> None:
    """Only the hidden states have a gradient, as with LoRA."""
    torch.manual_seed(4)
    head, labels = nn.Linear(HIDDEN, VOCABULARY), torch.arange(4)
    with torch.no_grad():
        assert token_logprobs(torch.ones(4, HIDDEN), head, labels, 1.0, VOCABULARY)[0].grad_fn is None
    head.requires_grad_(False)
    assert token_logprobs(torch.ones(4, HIDDEN), head, labels, 1.0, VOCABULARY)[0].grad_fn is None
    x, y = (torch.ones(4, HIDDEN).requires_grad_() for _ in range(2))
    token_logprobs(x, head, labels, 1.0, VOCABULARY)[0].sum().backward()
    plain(y, head, labels, 1.0, VOCABULARY)[0].sum().backward()
    assert head.weight.grad is None and x.grad is not None and y.grad is not None
    assert distance(x.grad, y.grad) < 1e-5


def test_without_tokens_gradients_are_zero() -> None:
    head, hidden = nn.Linear(HIDDEN, VOCABULARY), torch.zeros(0, HIDDEN, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy, _ = token_logprobs(hidden, head, none, 0.7, VOCABULARY, entropy_gradient=True)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, HIDDEN)
    for parameter in head.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_another_head_is_refused() -> None:
    head = nn.Sequential(nn.Linear(HIDDEN, VOCABULARY), nn.Tanh())
    with pytest.raises(ValueError, match="`model.path`: the output head is Sequential"):
        token_logprobs(torch.zeros(1, HIDDEN), head, torch.zeros(1, dtype=torch.int64), 1.0, VOCABULARY)


class Memory(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned, and the most that was held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes() // 4)
        self._made = {key: value for key, value in self._made.items() if not value[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return out


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_no_tensor_is_larger_than_a_chunk_and_few_are_held(
    monkeypatch: pytest.MonkeyPatch, entropy_gradient: bool
) -> None:
    rows, size, chunk = 600, 2, 15 * VOCABULARY
    chunk_of(monkeypatch, chunk)
    head, hidden = nn.Linear(size, VOCABULARY), torch.randn(rows, size, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.int64)
    with Memory() as memory:
        logprobs, entropy, _ = token_logprobs(hidden, head, labels, 0.9, VOCABULARY, entropy_gradient=entropy_gradient)
        (logprobs.sum() + entropy.sum() if entropy_gradient else logprobs.sum()).backward()
    assert rows * size < memory.largest <= chunk
    assert memory.most < rows * VOCABULARY / 4, "one copy of the logits is four times as much"
