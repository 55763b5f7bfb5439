"""Collation and log-probabilities of the packed policy, in one process."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from dapo.types import TrainSequence
from workers.training.forward.attention import PACKED_ATTENTION
from workers.training.forward.policy import PackedPolicy, collate

CPU = torch.device("cpu")


def sequence(prompt: list[int], response: list[int], advantage: float = 1.0) -> TrainSequence:
    return TrainSequence(
        token_ids=np.array(prompt + response, np.int32),
        num_prompt_tokens=len(prompt),
        rollout_logprobs=-np.arange(1, len(response) + 1, dtype=np.float32),
        advantage=advantage,
        token_weight=0.5 * advantage,
        staleness=np.full(len(response), len(prompt), np.int32),
    )


def build_policy(temperature: float, *, tied: bool = True) -> PackedPolicy:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=40,
        tie_word_embeddings=tied,
        initializer_range=0.4,
    )
    return PackedPolicy(Qwen2ForCausalLM._from_config(config, attn_implementation=PACKED_ATTENTION), temperature)


def test_collate() -> None:
    batch = collate([sequence([5, 6, 7], [8, 9], 2.0), sequence([3], [4], -1.0)], CPU)
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 9, 3, 4]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert batch.segments.lengths == (5, 2)
    assert batch.segments.cu_seq_lens.tolist() == [0, 5, 7]
    assert batch.predictors.tolist() == [2, 3, 5]
    assert batch.labels.tolist() == [8, 9, 4]
    assert batch.rollout_logprobs.tolist() == [-1, -2, -1]
    assert batch.advantages.tolist() == [2, 2, -1]
    assert batch.weights.tolist() == [1, 1, -0.5]
    assert batch.segment_ids.tolist() == [0, 0, 1]
    assert batch.staleness.tolist() == [3, 3, 1]


def test_what_the_policy_did_not_sample_is_read_and_not_predicted() -> None:
    mask = np.array([True, False, False, True, True])
    whole = sequence([5, 6], [7, 8, 9, 10, 11])
    turns = dataclasses.replace(
        whole, rollout_logprobs=whole.rollout_logprobs[mask], staleness=whole.staleness[mask], token_mask=mask
    )
    batch = collate([sequence([3], [4]), turns], CPU)
    assert batch.token_ids.tolist() == [[3, 4, 5, 6, 7, 8, 9, 10, 11]]
    assert batch.predictors.tolist() == [0, 3, 6, 7]
    assert batch.labels.tolist() == [4, 7, 10, 11]
    assert batch.rollout_logprobs.tolist() == [-1, -1, -4, -5]
    assert batch.segment_ids.tolist() == [0, 1, 1, 1]
    assert [len(values) for values in (batch.advantages, batch.weights, batch.staleness)] == [4, 4, 4]


def run(policy: PackedPolicy, sequences: list[TrainSequence]) -> tuple[torch.Tensor, torch.Tensor]:
    batch = collate(sequences, CPU)
    return policy(batch)


def test_without_sequences_nothing_comes_out_but_gradients_are_zero() -> None:
    policy = build_policy(1.0)
    logprobs, entropy = run(policy, [])
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_and_entropy_are_those_of_transformers(temperature: float, tied: bool) -> None:
    policy = build_policy(temperature, tied=tied)
    sequences = [sequence([1, 2, 3], [4, 5, 6, 7]), sequence([9], [8]), sequence([4, 4], [1, 30, 12])]
    logprobs, entropy = run(policy, sequences)

    plain = Qwen2ForCausalLM(policy.model.config).eval()
    plain.load_state_dict(policy.model.state_dict())
    plain.set_attn_implementation("eager")
    start = 0
    for s in sequences:
        tokens = torch.from_numpy(s.token_ids).long()
        logits = plain(tokens[None]).logits[0, s.num_prompt_tokens - 1 : -1]
        distribution = torch.distributions.Categorical(logits=logits / temperature)
        end = start + len(s.rollout_logprobs)
        torch.testing.assert_close(logprobs[start:end], distribution.log_prob(tokens[s.num_prompt_tokens :]))
        torch.testing.assert_close(entropy[start:end], distribution.entropy())
        start = end
    assert start == len(logprobs)
    assert not entropy.requires_grad


def test_dropout_is_off_in_training_mode() -> None:
    policy = build_policy(1.0)
    policy.model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.5), policy.model.lm_head)
    assert PackedPolicy(policy.model, 1.0).train().model.lm_head[0].p == 0.0
