"""The packing: a hard bound, every sequence once, equal counts, balance."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.algorithm.packing import estimated_work, pack


@given(lengths=st.lists(st.integers(1, 100), max_size=60), num_ranks=st.integers(1, 5), slack=st.integers(0, 150))
def test_invariants(lengths, num_ranks, slack):
    max_tokens = max(lengths, default=1) + slack
    ranks = pack(lengths, num_ranks, max_tokens)

    assert len(ranks) == num_ranks
    counts = {len(micro_batches) for micro_batches in ranks}
    assert len(counts) == 1 and counts.pop() >= 1
    micro_batches = [indices for rank in ranks for indices in rank]
    assert sorted(i for indices in micro_batches for i in indices) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in indices) <= max_tokens for indices in micro_batches)
    # First fit leaves at most one micro-batch half empty, so twice the tokens are always enough.
    assert len(ranks[0]) <= max(1, math.ceil((2 * sum(lengths) / max_tokens + 1) / num_ranks))
    assert pack(lengths, num_ranks, max_tokens) == ranks


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "max_tokens", "expected"),
    [
        pytest.param([], 2, 10, [[[]], [[]]], id="nothing"),
        pytest.param([3, 9, 5, 1], 1, 100, [[[0, 1, 2, 3]]], id="one_micro_batch"),
        pytest.param([9, 9, 1, 1], 2, 100, [[[0, 2]], [[1, 3]]], id="balanced"),
        pytest.param([6, 6, 6], 2, 10, [[[0], [2]], [[1], []]], id="padding_micro_batch"),
        pytest.param([4, 4, 3, 3, 3, 3], 1, 10, [[[0, 2, 4], [1, 3, 5]]], id="exactly_full"),
        # Spread by load these would leave two rooms of 3 and 4 for the last 7.
        pytest.param([7, 7, 6, 4, 3, 3], 1, 10, [[[2, 3], [0, 4], [1, 5]]], id="first_fit_saves_a_micro_batch"),
        # 8 and 2 on one rank: the other has 8 and 2 as well, not twice 5.
        pytest.param(
            [8, 2, 2, 2, 2, 2, 1, 1], 2, 9, [[[0], [6, 7]], [[1, 2, 3, 4], [5]]], id="one_profile_for_all_ranks"
        ),
        # Heaviest with heaviest, 12 + 7; each rank on its own would have 9 + 12.
        pytest.param([9, 6, 6, 7, 6], 2, 13, [[[1, 4], [2]], [[0], [3]]], id="heavy_micro_batches_meet"),
    ],
)
def test_examples(lengths, num_ranks, max_tokens, expected):
    assert pack(lengths, num_ranks, max_tokens) == expected


def test_work_not_tokens_is_balanced():
    """Nine tokens each where attention costs little; where it costs as much as the rest at one token, 42 against 48."""
    assert pack([6, 3, 3, 3, 3], 2, 100) == [[[0, 4]], [[1, 2, 3]]]
    assert pack([6, 3, 3, 3, 3], 2, 100, equal_at=1) == [[[0]], [[1, 2, 3, 4]]]


def test_sequences_of_one_prompt_are_together_where_that_saves_work():
    """Sixteen responses of 10 tokens to each of four prompts of 90."""
    lengths = [100] * 64
    prompts = [(bytes([i // 16]), 90) for i in range(64)]
    groups = [list(range(start, start + 16)) for start in range(0, 64, 16)]
    assert sorted(i for [i] in pack(lengths, 4, 1600, prompts=prompts)) == groups
    # More ranks than groups: each has a half, instead of half of them all.
    assert sorted(i for [i] in pack(lengths, 8, 1600, prompts=prompts)) == sorted(
        g[k : k + 8] for g in groups for k in (0, 8)
    )
    # Without prompts, and where they are a small part, lengths alone decide.
    apart = pack(lengths, 4, 1600)
    assert apart != pack(lengths, 4, 1600, prompts=prompts)
    assert apart == pack(lengths, 4, 1600, prompts=[(prompt, 9) for prompt, _ in prompts])


@given(data=st.data(), num_ranks=st.integers(1, 4), slack=st.integers(0, 150))
def test_invariants_with_prompts(data, num_ranks, slack):
    groups = data.draw(st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(1, 30), max_size=9)), max_size=6))
    lengths = [prompt + length for prompt, responses in groups for length in responses]
    prompts = [(bytes([k]), prompt) for k, (prompt, responses) in enumerate(groups) for _ in responses]
    max_tokens = max(lengths, default=1) + slack
    ranks = pack(lengths, num_ranks, max_tokens, prompts=prompts)
    assert len(ranks) == num_ranks and len({len(micro_batches) for micro_batches in ranks}) == 1
    micro_batches = [indices for rank in ranks for indices in rank]
    assert sorted(i for indices in micro_batches for i in indices) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in indices) <= max_tokens for indices in micro_batches)


def test_a_sequence_that_cannot_fit_is_named_with_the_remedy():
    with pytest.raises(ValueError, match=r"`actor.max_tokens_per_gpu` x .* \(10\).* 1 has 11 tokens.*raise one"):
        pack([3, 11], 2, 10)


@pytest.mark.parametrize(
    ("num_ranks", "shared_by"), [pytest.param(64, 1, id="64_ranks"), pytest.param(16, 4, id="16_groups_of_4")]
)
@pytest.mark.parametrize("seed", range(2))
def test_log_normal_lengths_are_balanced(num_ranks, shared_by, seed):
    """The published mini-batch: 32 prompts x 16 responses, at most 20,480 tokens, on 64 GPUs of 22,528 tokens."""
    rng = Random(seed)
    lengths = [200 + min(20_480, int(rng.lognormvariate(8.5, 0.8))) for _ in range(512)]
    ranks = pack(lengths, num_ranks, 22_528 * shared_by)
    work = [sum(estimated_work(lengths[i]) for indices in rank for i in indices) for rank in ranks]
    assert max(work) <= 1.05 * sum(work) / len(work)
    assert len(ranks[0]) == math.ceil(sum(lengths) / (22_528 * shared_by * num_ranks))
