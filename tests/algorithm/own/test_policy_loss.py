"""A person's own loss: what it may ask for, what it is refused for, and that the built-in one as a file is the same."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from dapo.algorithm.objective import Constants, objective
from dapo.algorithm.own.loading import OwnFunction, OwnFunctionError, load, read
from dapo.algorithm.own.soft_gate import soft_gate
from dapo.config.algorithm import AlgorithmConfig, SapoConfig
from dapo.loss import cispo_loss, gspo_loss, policy_loss, sapo_loss
from tests.support.policy_loss_check import check_policy_loss, make_tokens

KEY = "algorithm.policy_loss"
HEAD = "import torch\nfrom dapo.loss import clamped_difference, segment_sum\nfrom dapo.loss import _checked, _stats\n"
EXAMPLE = Path(__file__).resolve().parents[3] / "dapo" / "algorithm" / "own" / "soft_gate.py"


def own(folder: Path, body: str) -> OwnFunction:
    """A function with these lines, which see its ratio as `r`."""
    lines = ["r = clamped_difference(logprobs, old_logprobs).exp()", *body.splitlines()]
    text = HEAD + "def mine(logprobs, old_logprobs, advantages, segment_ids):\n" + "".join(f"    {x}\n" for x in lines)
    (folder / "my.py").write_text(text)
    return load(read(KEY, f"{folder}/my.py:mine"))


def as_file(folder: Path, *functions) -> Path:
    """The built-in functions in a file of their own."""
    source = inspect.getsource(inspect.getmodule(policy_loss))
    imports = source[source.index("from collections") : source.index("MAX_LOG_RATIO")]
    file = folder / "copied.py"
    file.write_text(imports + HEAD + "\n\n".join(inspect.getsource(function) for function in functions))
    return file


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("return -advantages * r", id="no clipping"),
        pytest.param("return -advantages * r, {'clipped': r > 1.2}", id="some"),
        pytest.param("return torch.where(advantages > 0, -advantages * r, torch.zeros_like(r))", id="right ones alone"),
        pytest.param("n = segment_sum(torch.ones_like(r), segment_ids)\nreturn -advantages * r / n", id="by response"),
    ],
)
def test_sound_losses_pass(tmp_path, body):
    check_policy_loss(own(tmp_path, body), AlgorithmConfig())


PACKED = ["depends on how responses are packed into micro-batches", "differs by up to", "segment_ids"]
FAR_OFF = "return -advantages * torch.exp(10 * (logprobs - old_logprobs))"
KINK = "return -advantages * (r + torch.sqrt((r - 1).square()))"
ROW_ORDER = "return -advantages * r * torch.linspace(0.5, 1.5, len(r))"
LESS_THE_MEAN = "loss = -advantages * r\nreturn loss - loss.mean()"
MASKED = "return -advantages * r / (advantages == 0).sum().clamp(min=1)"
RANDOM = "return -advantages * r * (1 + torch.rand_like(r))"
BROKEN = [
    pytest.param("return -advantages * r / 0.0", ["loss that is not finite in 19 of 19 tokens"], id="nan"),
    pytest.param(FAR_OFF, ["not finite", "where the log-ratio is 20", "clamped_difference"], id="infinite far off"),
    pytest.param(KINK, ["a gradient that is not finite", "where the policy is the one that sampled"], id="gradient"),
    pytest.param("return (-advantages * r).mean()", ["a loss of shape ()", "shape (19,) and type float32"], id="shape"),
    pytest.param("return (-advantages * r).double()", ["a loss of type float64", "float32"], id="dtype"),
    pytest.param("return None", ["gives NoneType as a loss"], id="nothing"),
    pytest.param("return -advantages * r, {'kl': r}", ["statistics kl", "approx_kl"], id="unknown statistics"),
    pytest.param("return -advantages * r, {'clipped': r}", ["`clipped` of type float32", "bool"], id="statistics"),
    pytest.param(ROW_ORDER, ["depends on the order of the responses", "loss of a token differs"], id="order of rows"),
    pytest.param("return -advantages * r / len(r)", PACKED, id="number of tokens"),
    pytest.param("return -(advantages - advantages.mean()) * r", PACKED, id="mean over the micro-batch"),
    pytest.param(LESS_THE_MEAN, ["how responses are packed", "its own response alone"], id="less the mean"),
    pytest.param(MASKED, ["depends on masked tokens"], id="masked"),
    pytest.param("return (-advantages * r).detach()", ["a loss without gradient", "logprobs.detach()"], id="detached"),
    pytest.param("return -advantages * r.detach() + 0 * logprobs", ["gradient 0 for every token"], id="no gradient"),
    pytest.param("return advantages * r", ["less likely", "turn its sign"], id="sign"),
    pytest.param("advantages.mul_(2)\nreturn -advantages * r", ["changes `advantages` in place"], id="in place"),
    pytest.param(RANDOM, ["another loss for the same tokens"], id="random"),
    pytest.param("return -advantages * gain", ["raised NameError", "at line 6 of my.py"], id="raises"),
]


@pytest.mark.parametrize(("body", "parts"), BROKEN)
def test_broken_losses_are_refused_with_the_reason(tmp_path, body, parts):
    with pytest.raises(OwnFunctionError) as error:
        check_policy_loss(own(tmp_path, body), AlgorithmConfig())
    for part in (f"`{KEY}`", f"{tmp_path}/my.py:mine", *parts):
        assert part in str(error.value)


def constants_of(tokens, weights: torch.Tensor) -> Constants:
    return Constants(
        old_logprobs=tokens.old_logprobs,
        ref_logprobs=None,
        correction=torch.ones_like(weights),
        advantages=tokens.advantages,
        weights=weights,
        segment_ids=tokens.segment_ids - 1,
    )


@pytest.mark.parametrize("function", [policy_loss, gspo_loss, cispo_loss], ids=lambda function: function.__name__)
def test_the_built_in_losses_pass_and_give_the_same_bits(tmp_path, function):
    file = as_file(tmp_path, function)
    name = {policy_loss: "clip", gspo_loss: "gspo", cispo_loss: "cispo"}[function]
    cfg = AlgorithmConfig(policy_loss=name, clip_ratio_c=1.1, entropy_coeff=0.1)
    loaded = load(read(KEY, f"{file}:{function.__name__}"))
    check_policy_loss(loaded, cfg)
    tokens = make_tokens(0.4)
    constants = constants_of(tokens, tokens.weights.masked_fill(tokens.segment_ids == 2, 0.0))
    found = []
    for own_loss in (None, loaded):
        leaf = tokens.logprobs.clone().requires_grad_()
        result = objective(leaf, -leaf.detach(), constants, cfg, own_loss)
        result.loss.backward()
        found.append((leaf.grad, result))
    (gradient, plain), (same, mine) = found
    assert torch.equal(gradient, same) and gradient.any() and torch.equal(plain.loss, mine.loss)
    assert torch.equal(plain.log_ratio, mine.log_ratio) and torch.equal(plain.dual_clipped, mine.dual_clipped)
    assert torch.equal(plain.clipped_low | plain.clipped_high, mine.clipped_low | mine.clipped_high)


def test_without_statistics_nothing_is_clipped_and_the_distance_is_there(tmp_path):
    tokens = make_tokens(0.4)
    mine, constants = own(tmp_path, "return -advantages * r"), constants_of(tokens, tokens.weights)
    result = objective(tokens.logprobs.requires_grad_(), tokens.weights, constants, AlgorithmConfig(), mine)
    assert not (result.clipped_low | result.clipped_high | result.dual_clipped).any()
    torch.testing.assert_close(result.log_ratio, tokens.logprobs.detach() - tokens.old_logprobs)


def test_the_example_is_the_readmes_and_passes():
    readme = (EXAMPLE.parent / "README.md").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert EXAMPLE.read_text().endswith(shown)
    check_policy_loss(load(read(KEY, f"{EXAMPLE}:soft_gate")), AlgorithmConfig())
    tokens, taus = make_tokens(0.4), SapoConfig()
    given = (tokens.logprobs, tokens.old_logprobs, tokens.advantages)
    built_in, _ = sapo_loss(*given, tau_positive=taus.tau_positive, tau_negative=taus.tau_negative)
    assert torch.equal(soft_gate(*given), built_in)
