"""Collation of packed sequences. What the policy says of them: test_families and test_update."""

import dataclasses

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from dapo.types import TrainSequence
from dapo.workers.training.forward.attention import PACKED_ATTENTION
from dapo.workers.training.forward.policy import PackedPolicy, collate

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


def build_policy() -> PackedPolicy:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, **heads)
    return PackedPolicy(Qwen2ForCausalLM._from_config(config, attn_implementation=PACKED_ATTENTION), 1.0)


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


def test_a_prompt_that_neighbours_share_is_laid_out_once() -> None:
    one, other = sequence([5, 6, 7], [8, 9]), sequence([5, 6, 7], [2])
    batch = collate([sequence([3], [4]), one, other], CPU)
    assert batch.token_ids.tolist() == [[3, 4, 5, 6, 7, 8, 9, 7, 2]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 4, 2, 3]]
    assert batch.predictors.tolist() == [0, 4, 5, 7]
    assert batch.labels.tolist() == [4, 8, 9, 2]
    assert batch.segment_ids.tolist() == [0, 1, 1, 2]
    assert batch.segments.lengths == (2, 2, 3, 2)
    prompts = batch.segments.prompts
    assert prompts is not None and prompts.of == (0, 1, 1, 1)
    assert prompts.cu_seq_lens.tolist() == [0, 2, 4, 9, 13]
    for apart in (
        collate([one, other], CPU, share_prompts=False),  # for an attention that does not know of it
        collate([one, sequence([5, 4, 7], [2])], CPU),
        collate([sequence([5, 6, 7], [8] * 20), sequence([5, 6, 7], [9] * 20)], CPU),  # 2 tokens of 46
    ):
        assert len(apart.segments.lengths) == 2 and apart.segments.prompts is None


def test_without_sequences_nothing_comes_out_but_gradients_are_zero() -> None:
    policy = build_policy()
    logprobs, entropy, _ = policy(collate([], CPU))
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_dropout_is_off_in_training_mode() -> None:
    policy = build_policy()
    policy.model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.5), policy.model.lm_head)
    assert PackedPolicy(policy.model, 1.0).train().model.lm_head[0].p == 0.0
