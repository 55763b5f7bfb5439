"""The mismatch budget names the cause of a difference that was planted between an engine and the actors: plain
transformers samples in the place of an engine, and the packed policy of the ranks computes in the actors' place."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from dapo.algorithm.mismatch import SWITCHED, Variant
from dapo.config.schema import Config
from dapo.types import Int32Array, Response, Sampling, TrainSequence, VersionSpan
from dapo.workers.engines.worker import values_of
from dapo.workers.rollout import canary_sequence
from dapo.workers.training.forward.attention import PACKED_ATTENTION
from dapo.workers.training.forward.policy import PackedPolicy, collate
from dapo.workers.weight_sync import WeightSync

CAUSES = (*SWITCHED, "kernels", "staleness")
TEMPERATURE, VOCABULARY, TOKENS = 0.8, 64, 24
CPU = torch.device("cpu")
SAMPLING = Sampling(
    n=1, temperature=TEMPERATURE, top_p=1.0, top_k=-1, max_tokens=TOKENS, support=20, support_logprobs=True
)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        initializer_range=0.4,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM._from_config(config, attn_implementation=PACKED_ATTENTION).eval()


@dataclass
class Engine:
    """model: with plain attention. Samples at `temperature` from the tokens of `top_p`; head: computes the logits."""

    model: nn.Module
    temperature: float = TEMPERATURE
    top_p: float = 1.0
    head: Callable[[torch.Tensor], torch.Tensor] | None = None

    @torch.no_grad()
    def distribution(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of the next token, [vocabulary]."""
        hidden = self.model.model(torch.tensor([token_ids])).last_hidden_state[0, -1]
        logits = (self.head or self.model.lm_head)(hidden).float() / self.temperature
        ordered, order = logits.softmax(-1).sort(descending=True)
        cut = ordered.cumsum(0) - ordered >= self.top_p
        return logits.index_fill(0, order[cut], -torch.inf).log_softmax(-1)

    def respond(self, prompt: Int32Array, sampling: Sampling, seed: int) -> Response:
        generator, token_ids = torch.Generator().manual_seed(seed), prompt.tolist()
        flat_ids, flat = [], []  # as in vLLM's `FlatLogprobs`
        for _ in range(sampling.max_tokens):
            logprobs = self.distribution(token_ids)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            likely = logprobs.topk(sampling.support)
            flat_ids += [token, *likely.indices.tolist()]
            flat += [float(logprobs[token]), *likely.values.tolist()]
            token_ids.append(token)
        starts = range(0, len(flat), sampling.support + 1)
        returned = SimpleNamespace(token_ids=flat_ids, logprobs=flat, start_indices=starts)
        logprobs, support = values_of(returned, sampling)
        experts = self.experts(token_ids[:-1]) if hasattr(self.model.model.layers[0].mlp, "gate") else None
        return Response(
            token_ids=np.array(token_ids[len(prompt) :], np.int32),
            rollout_logprobs=logprobs,
            text="",
            finish_reason="length",
            policy_versions=(VersionSpan(version=1, start=0, end=sampling.max_tokens),),
            engine=0,
            seconds=0.0,
            support=support,
            experts=experts,
        )

    @torch.no_grad()
    def experts(self, token_ids: Sequence[int]) -> np.ndarray:
        chosen: list[torch.Tensor] = []
        note = lambda module, args, output: chosen.append(output[2])  # noqa: E731
        hooks = [layer.mlp.gate.register_forward_hook(note) for layer in self.model.model.layers]
        self.model.model(torch.tensor([token_ids]))
        for hook in hooks:
            hook.remove()
        return torch.stack(chosen, dim=1).numpy().astype(np.uint8)


@dataclass
class Engines:
    engine: Engine

    def take_weights(self, *given: object) -> None: ...

    async def probe(self, prompts: Sequence[Int32Array], sampling: Sampling, seed: int) -> list[TrainSequence]:
        return [
            canary_sequence(prompt, self.engine.respond(prompt, sampling, seed + k)) for k, prompt in enumerate(prompts)
        ]


@dataclass
class Actors:
    policy: PackedPolicy

    async def probe(self, sequences: Sequence[TrainSequence], variant: Variant) -> list[np.ndarray]:
        found = self.policy.probe(collate(sequences, CPU), variant)
        return [part.numpy() for part in found.split([len(one.rollout_logprobs) for one in sequences])]


def make_mixture() -> nn.Module:
    torch.manual_seed(4)
    config = Qwen3MoeConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        initializer_range=0.4,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    return Qwen3MoeForCausalLM._from_config(config, attn_implementation=PACKED_ATTENTION).eval()


def other_router(model: nn.Module) -> nn.Module:
    """A copy whose routers prefer some experts a little more, and weigh the chosen ones as before."""
    preferred = torch.randn(8, generator=torch.Generator().manual_seed(5))

    def choose(module: nn.Module, args: object, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, _ = output
        chosen = (logits + 0.3 * preferred).topk(2).indices
        shares = logits.softmax(-1).gather(-1, chosen)
        return logits, (shares / shares.sum(-1, keepdim=True)).to(weights.dtype), chosen

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(choose)
    return model


def plain(model: nn.Module) -> nn.Module:
    """A copy with the attention of transformers."""
    other = copy.deepcopy(model)
    other.config._attn_implementation = "sdpa"
    return other


def moved(model: nn.Module, scale: float) -> nn.Module:
    """A copy with other weights, as those of an older policy."""
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * parameter.std() * torch.randn_like(parameter) if parameter.numel() > 1 else 0.0)
    return model


def rounded(model: nn.Module) -> nn.Module:
    """A copy whose layers, not the head, hold their weights in bfloat16, as another kernel might."""
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


def bfloat16_head(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    head = copy.deepcopy(model.lm_head).bfloat16()
    return lambda hidden: head(hidden.bfloat16())


PLANTED: dict[str, Callable[[nn.Module], Engine]] = {
    "temperature": lambda model: Engine(plain(model), temperature=1.1 * TEMPERATURE),
    "support": lambda model: Engine(plain(model), top_p=0.7),
    "head": lambda model: Engine(plain(model), head=bfloat16_head(model)),
    "router": lambda model: Engine(other_router(plain(model))),
    "kernels": lambda model: Engine(rounded(plain(model))),
}


def metrics(model: nn.Module, engine: Engine, stale: float = 0.0) -> dict[str, float]:
    sync = WeightSync(Actors(PackedPolicy(model, TEMPERATURE)), Engines(engine), Config())
    prompts = [np.arange(5 + k, 12 + 2 * k, dtype=np.int32) for k in range(6)]
    return asyncio.run(sync.compare(prompts, SAMPLING, 70, stale))


def by_cause(found: dict[str, float]) -> dict[str, float]:
    return {cause: found.get(f"mismatch/{cause}_mean", 0.0) for cause in CAUSES}


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_named(cause: str) -> None:
    model = make_mixture() if cause == "router" else make_model()
    found = metrics(model, PLANTED[cause](model))
    parts = by_cause(found)
    assert max(parts, key=lambda each: parts[each]) == cause, found
    assert parts[cause] > 0.7 * found["mismatch/mean"] > 1e-4
    assert found[f"mismatch/{cause}_tail"] > 0.5 * found["mismatch/tail"] > 0.5 * found["mismatch/mean"], found


def test_tokens_of_older_weights_are_named_stale() -> None:
    """The engine has the actors' weights now, and had others when it sampled the batch."""
    model = make_model()
    former = Engine(moved(plain(model), 0.02))
    response = former.respond(np.arange(5, 12, dtype=np.int32), SAMPLING, 1)
    batch = collate([canary_sequence(np.arange(5, 12, dtype=np.int32), response)], CPU)
    with torch.no_grad():
        stale = float((PackedPolicy(model, TEMPERATURE)(batch)[0] - batch.rollout_logprobs).abs().mean())
    parts = by_cause(metrics(model, Engine(plain(model)), stale))
    assert max(parts, key=lambda each: parts[each]) == "staleness"
    assert parts["staleness"] == pytest.approx(stale, rel=1e-3) and stale > 1e-3


def test_without_a_difference_nothing_is_named() -> None:
    model = make_model()
    found = metrics(model, Engine(plain(model)))
    assert found["mismatch/mean"] < 1e-6 and max(by_cause(found).values()) < 1e-6


def test_truncated_sampling_that_is_replayed_is_no_difference() -> None:
    model = make_model()
    sync = WeightSync(
        Actors(PackedPolicy(model, TEMPERATURE, truncated=True)), Engines(Engine(plain(model), top_p=0.7)), Config()
    )
    prompts = [np.arange(5 + k, 12 + 2 * k, dtype=np.int32) for k in range(6)]
    found = asyncio.run(sync.compare(prompts, replace(SAMPLING, top_p=0.7, top_k=60, support=VOCABULARY), 70, 0.0))
    assert found["mismatch/mean"] < 1e-6
