"""Responses of several turns: what the policy did not sample is in no length, weight, penalty or gradient."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from dapo.algorithm.batch import advantages_of, build_batch, penalize_kl, reference_batch
from dapo.algorithm.objective import Constants, objective, rollout_correction
from dapo.config.algorithm import LOSS_AGG_MODES, AlgorithmConfig
from dapo.config.schema import Config
from dapo.state.groups import FILE, read_groups, write_groups
from dapo.types import Group, Mask, VersionSpan
from dapo.workers.training.forward.attention import PACKED_ATTENTION
from dapo.workers.training.forward.policy import PackedPolicy, collate
from tests.support.fakes import make_group
from tests.support.training.plain_reference import TEMPERATURE, VOCABULARY, distance, make_config, make_model, reference

BOUND = 1e-5
CPU = torch.device("cpu")
MASKS = ((), (3, 4), (1,), (2, 3, 4, 5), ())  # places that were not sampled, by response; of the others all were


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=False)


def masked(length: int, places: tuple[int, ...]) -> Mask | None:
    mask = np.ones(length, np.bool_)
    mask[list(places)] = False
    return mask if places else None


def make_groups(*, unsampled: float) -> list[Group]:
    """Three groups; every token that was not sampled is said to have the log-probability `unsampled`."""
    rng = np.random.default_rng(7)
    groups = []
    for index in range(3):
        group = make_group(index, [1.0, 0.0, 0.0, 1.0, 0.0], [1.0, -1.0, -0.5, 0.7, -0.2])
        responses = []
        for places in MASKS:
            length = int(rng.integers(7, 12))
            mask = masked(length, places)
            logprobs = (-3.0 + 0.5 * rng.normal(size=length)).astype(np.float32)
            if mask is not None:
                logprobs[~mask] = unsampled
            ids = rng.integers(2, VOCABULARY, length).astype(np.int32)
            spans = (VersionSpan(version=0, start=0, end=length),)
            given = {"token_ids": ids, "rollout_logprobs": logprobs, "policy_versions": spans, "token_mask": mask}
            responses.append(dataclasses.replace(group.responses[0], **given))
        groups.append(dataclasses.replace(group, responses=tuple(responses)))
    return groups


def configured(model_dir: Path, **algorithm: str) -> Config:
    cfg = make_config(model_dir)
    cfg.algorithm = AlgorithmConfig(**algorithm)
    cfg.algorithm.rollout_correction.use_rollout_logprobs = True
    cfg.actor.ppo_mini_batch_size = 3
    cfg.data.max_response_length = 20
    return cfg


def packed_gradients(model_dir: Path, groups: list[Group], cfg: Config) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by what runs on a rank: one packed micro-batch."""
    model = Qwen2ForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    policy = PackedPolicy(model, TEMPERATURE)
    [sequences] = build_batch(groups, cfg, version=0).minibatches
    batch = collate(sequences, CPU)
    logprobs, entropy, _ = policy(batch)
    correction = rollout_correction(
        logprobs.detach(), batch.rollout_logprobs, batch.segment_ids, cfg.algorithm.rollout_correction
    )
    constants = Constants(
        old_logprobs=batch.rollout_logprobs,
        ref_logprobs=None,
        correction=correction.weights,
        advantages=batch.advantages,
        weights=batch.weights,
        segment_ids=batch.segment_ids,
    )
    loss = objective(logprobs, entropy, constants, cfg.algorithm).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def plain_gradients(model_dir: Path, groups: list[Group], cfg: Config) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by transformers, one sequence at a time: a loss for every response token, times a mask made by hand."""
    model = reference(model_dir)
    low, high, cap = 0.8, 1.28, cfg.algorithm.clip_ratio_c
    sums, counts = [], []
    for group in groups:
        rewards = torch.tensor([score.reward for score in group.scores], dtype=torch.float64)
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).float()
        for places, response, advantage in zip(MASKS, group.responses, advantages, strict=True):
            prompt = group.draw.prompt.token_ids
            tokens = torch.from_numpy(np.concatenate([prompt, response.token_ids])).long()
            logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            logprobs = logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]
            mask = torch.tensor([float(k not in places) for k in range(len(response.token_ids))])
            difference = (logprobs - torch.from_numpy(np.nan_to_num(response.rollout_logprobs))) * mask
            ratio = difference.exp()
            if cfg.algorithm.policy_loss == "gspo":
                ratio = (difference.sum() / mask.sum()).exp().expand(len(mask))
            if cfg.algorithm.policy_loss == "cispo":
                loss = -advantage * ratio.detach().clamp(low, high) * logprobs
            else:
                loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
                if advantage < 0 and cfg.algorithm.policy_loss != "gspo":
                    loss = torch.minimum(loss, -cap * advantage)
            sums.append((loss * mask).sum())
            counts.append(mask.sum())
    n = len(MASKS)
    loss = {
        "token-mean": lambda: sum(sums) / sum(counts),
        "group-token-mean": lambda: (
            sum(sum(sums[k : k + n]) / sum(counts[k : k + n]) for k in range(0, len(sums), n)) / len(groups)
        ),
        "seq-mean-token-mean": lambda: sum(s / c for s, c in zip(sums, counts, strict=True)) / len(sums),
        "seq-mean-token-sum": lambda: sum(sums) / len(sums),
        "seq-mean-token-sum-norm": lambda: sum(sums) / len(sums) / cfg.data.max_response_length,
    }[cfg.algorithm.loss_agg_mode]()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("policy_loss", ["clip", "gspo", "cispo"])
def test_loss_and_gradients_are_those_of_transformers_with_a_mask(model_dir, mode, policy_loss):
    cfg = configured(model_dir, loss_agg_mode=mode, policy_loss=policy_loss)
    groups = make_groups(unsampled=math.nan)  # what nobody sampled has no log-probability
    loss, found = packed_gradients(model_dir, groups, cfg)
    wanted_loss, wanted = plain_gradients(model_dir, groups, cfg)
    assert loss == pytest.approx(wanted_loss, rel=1e-5, abs=1e-6)  # CISPO's terms are of size 3 and cancel to .002
    assert distance(found, wanted) <= BOUND


def test_lengths_and_advantages_count_sampled_tokens_alone():
    groups = make_groups(unsampled=0.0)
    for group in groups:
        totals = [len(response.token_ids) for response in group.responses]
        assert list(group.lengths) == [t - len(p) for t, p in zip(totals, MASKS, strict=True)]
        assert group.num_tokens == sum(totals) - sum(map(len, MASKS))
    cfg = Config()
    cfg.algorithm.advantage.function = "reinforce_plus_plus"
    shorter = []
    for group in groups:
        ids = [np.zeros(response.num_sampled, np.int32) for response in group.responses]
        cut = [dataclasses.replace(r, token_ids=i, token_mask=None) for r, i in zip(group.responses, ids, strict=True)]
        shorter.append(dataclasses.replace(group, responses=tuple(cut)))
    assert advantages_of(groups, cfg) == advantages_of(shorter, cfg)


def test_staleness_and_kl_penalty_are_of_sampled_tokens():
    group = make_groups(unsampled=math.nan)[0]
    spans = (VersionSpan(version=1, start=0, end=3), VersionSpan(version=4, start=5, end=7))
    second = dataclasses.replace(group.responses[1], policy_versions=spans)
    group = dataclasses.replace(group, responses=(group.responses[0], second, *group.responses[2:]))
    sequences = reference_batch([group], version=4)
    length = len(second.token_ids)
    assert sequences[1].staleness.tolist()[:5] == [3, 3, 3, 0, 0] and len(sequences[1].staleness) == length - 2
    assert len(sequences[1].token_ids) == length + sequences[1].num_prompt_tokens
    cfg = Config()
    cfg.algorithm.kl.reward_coeff, cfg.algorithm.kl.estimator = 0.5, "k1"
    half_a_nat_less = [sequence.rollout_logprobs - np.float32(0.5) for sequence in sequences]
    [penalized] = penalize_kl([group], half_a_nat_less, cfg)
    penalties = [score.parts["kl_penalty"] for score in penalized.scores]
    assert penalties == pytest.approx([-0.5 * 0.5 * n for n in group.lengths], rel=1e-6)


@pytest.mark.parametrize(
    ("mask", "turns"), [(None, 1), ("11011", 2), ("0110", 1), ("101001", 3), ("111", 1), ("000", 0), ("", 0)]
)
def test_turns_are_runs_of_sampled_tokens(mask, turns):
    sampled = None if mask is None else np.array([letter == "1" for letter in mask], np.bool_)
    [response, *_] = make_group(0, [1.0]).responses
    assert dataclasses.replace(response, token_mask=sampled).num_turns == turns


def test_masks_are_saved_and_groups_without_them_are_saved_as_ever(tmp_path):
    turns, plain = make_groups(unsampled=0.0)[0], make_group(1, [1.0, 0.0])
    groups = {group.draw.index: group for group in (turns, plain)}
    draw = lambda index: groups[index].draw  # noqa: E731
    write_groups(tmp_path / FILE, [(turns, 3), (plain, 4)])
    found = [group for group, _ in read_groups(tmp_path / FILE, draw)]
    for group, wanted in zip(found, (turns, plain), strict=True):
        for response, original in zip(group.responses, wanted.responses, strict=True):
            np.testing.assert_array_equal(response.token_mask, original.token_mask)
            np.testing.assert_array_equal(response.token_ids, original.token_ids)
    assert found[1].responses[0].token_mask is None
