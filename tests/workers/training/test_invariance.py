"""Gradient invariance: neither micro-batches nor ranks change gradient or step, for every objective.

The reference is plain autograd in one process, one sequence at a time, through the formula of each aggregation mode.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo.batch import build_batch
from dapo.config.algorithm import LOSS_AGG_MODES, AlgorithmConfig, KLConfig, RolloutCorrectionConfig
from dapo.config.schema import Config
from dapo.types import Draw, Group, Prompt, Response, Score, TrainSequence, VersionSpan
from tests.support.training.plain_reference import (
    VOCABULARY,
    full_weights,
    make_config,
    make_model,
    on_all,
    plain_logprobs,
    reconfigure,
    reference,
    start_pool,
    turns_mask,
)
from tests.support.training.plain_update import plain_tokens
from workers.actor import ActorPool, RankWork

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

BOUND = 1e-5
SGD_LR = 30.0  # moves every tensor by about its own size: else the rounding of the weights is all that one compares
MAX_RESPONSE = 40
RANKS = (1, 2)
ONE_AT_A_TIME = 0
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("policy"), tied=False)


@pytest.fixture(scope="module")
def reference_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights: against itself a policy has no KL."""
    return make_model(tmp_path_factory.mktemp("reference"), tied=False, seed=2)


@pytest.fixture(scope="module")
def pools(ray_cluster: None, model_dir: Path) -> dict[int, ActorPool]:
    return {ranks: start_pool(make_config(model_dir, num_workers=ranks)) for ranks in RANKS}


@pytest.fixture(scope="module")
def groups(model_dir: Path) -> list[Group]:
    """16 of 4 responses; some are truncated, one group altogether, and half hold tokens that were not sampled. The
    engine's log-probabilities are the model's plus noise, so that every clip acts on some tokens."""
    rng = np.random.default_rng(0)
    model = reference(model_dir)
    made = []
    for index in range(16):
        prompt_ids = rng.integers(2, VOCABULARY, rng.integers(2, 9)).astype(np.int32)
        prompt = Prompt(id=index, source="", messages=(), text="", token_ids=prompt_ids, ground_truth="", extra_info={})
        responses, scores = [], []
        for sample in range(4):
            truncated = index == 5 or (index % 6 == 2 and sample == 1)
            ids = rng.integers(2, VOCABULARY, rng.integers(1, MAX_RESPONSE + 1)).astype(np.int32)
            responses.append(_response(model, prompt_ids, ids, truncated, sample % 2 == 1, rng))
            reward = float(rng.normal())
            scores.append(Score(accuracy=reward, reward=reward, parts={}, metrics={}, prediction="", failure=""))
        draw = Draw(index=index, prompt=prompt)
        made.append(Group(draw=draw, responses=tuple(responses), scores=tuple(scores)))
    return made


def _response(model: Any, prompt: Any, ids: Any, truncated: bool, turns: bool, rng: np.random.Generator) -> Response:
    draft = TrainSequence(
        token_ids=np.concatenate([prompt, ids]),
        num_prompt_tokens=len(prompt),
        rollout_logprobs=np.zeros(len(ids), np.float32),
        advantage=0.0,
        token_weight=0.0,
        staleness=np.zeros(len(ids), np.int32),
    )
    with torch.no_grad():
        own = plain_logprobs(model, draft).numpy()
    noise = rng.normal(size=len(ids)) * np.where(rng.random(len(ids)) < 0.05, 3.0, 0.25)
    return Response(
        token_ids=ids,
        rollout_logprobs=(own + noise).astype(np.float32),
        text="",
        finish_reason="length" if truncated else "stop",
        policy_versions=(VersionSpan(version=0, start=0, end=len(ids)),),
        engine=0,
        seconds=0.0,
        token_mask=turns_mask(len(ids)) if turns else None,
    )


def config(model_dir: Path, **algorithm: Any) -> Config:
    """The ratio is against the engine's log-probabilities. Truncated responses are not trained on."""
    cfg = make_config(model_dir)
    cfg.algorithm = AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(use_rollout_logprobs=True), **algorithm)
    cfg.reward.overlong_filtering.enable = True
    cfg.actor.ppo_mini_batch_size = 16
    cfg.data.max_response_length = MAX_RESPONSE
    return cfg


def split(sequences: Sequence[TrainSequence], ranks: int, micro_batches: int) -> list[tuple[Any, ...]]:
    """[ranks] of exactly so many micro-batches, unbalanced; or of one sequence each, the last may be empty."""
    count = micro_batches or -(-len(sequences) // ranks)
    dealt = [sequences[i :: ranks * count] for i in range(ranks * count)]
    return [tuple(dealt[rank::ranks]) for rank in range(ranks)]


def gradients_and_moves(worker: Any, cfg: Config, work: RankWork, reduce_each: bool) -> list[tuple[Tensors, Tensors]]:
    """Runs on a rank: per mini-batch the gradient before clipping, and by how much one step of SGD moves the weights.

    reduce_each: gradients are reduced in every micro-batch, not in the last alone.
    """
    cfg.actor.reshard_after_forward = reduce_each
    reconfigure(worker, cfg)
    updater, named = worker._updater, dict(worker._policy.model.named_parameters())
    start = {name: p.to_local().clone() for name, p in named.items()}
    sgd = torch.optim.SGD(named.values(), lr=SGD_LR)
    before = {name: w.clone() for name, w in full_weights(worker).items()}  # on one rank they are the shards
    found = []
    for micro_batches in work.minibatches:
        batches = [updater._collate(sequences) for sequences in micro_batches]
        ref = updater._reference_of([batches])[0] if cfg.algorithm.kl.loss_coeff else None
        totals = updater._forward_backward(batches, None, ref)
        gradients = {name: p.grad.full_tensor() for name, p in named.items()}
        norm = torch.cat([g.double().flatten() for g in gradients.values()]).norm()
        assert totals.grad_norm == pytest.approx(float(norm), rel=1e-6)
        sgd.step()
        found.append((gradients, {name: w - before[name] for name, w in full_weights(worker).items()}))
        sgd.zero_grad()
        with torch.no_grad():
            for name, p in named.items():
                p.to_local().copy_(start[name])
    return found


def formula(losses: Sequence[Sequence[torch.Tensor]], mode: str) -> torch.Tensor:
    """Loss of one step from the tokens' losses, [groups][trained responses] of [R]."""
    losses = [group for group in losses if group]
    responses = [response for group in losses for response in group]
    match mode:
        case "token-mean":
            return torch.cat(responses).mean()
        case "group-token-mean":
            return torch.stack([torch.cat(list(group)).mean() for group in losses]).mean()
        case "seq-mean-token-mean":
            return torch.stack([response.mean() for response in responses]).mean()
        case "seq-mean-token-sum":
            return torch.stack([response.sum() for response in responses]).mean()
        case "seq-mean-token-sum-norm":
            return torch.stack([response.sum() for response in responses]).mean() / MAX_RESPONSE
    raise AssertionError(mode)


def plain(
    model_dir: Path, reference_dir: Path, cfg: Config, groups: Sequence[Group], sequences: Sequence[TrainSequence]
) -> tuple[Tensors, Tensors, Tensors]:
    """(gradient, move by SGD, all tokens that clipping acted on)."""
    model, base = reference(model_dir), reference(reference_dir)
    remaining = iter(sequences)
    losses, tokens = [], []
    for group in groups:
        chosen = [next(remaining) for response in group.responses if response.finish_reason == "stop"]
        for sequence in chosen:
            with torch.no_grad():
                ref = plain_logprobs(base, sequence) if cfg.algorithm.kl.loss_coeff else None
            tokens.append(plain_tokens(model, sequence, cfg.algorithm, ref=ref))
        losses.append([t["loss"] for t in tokens[len(tokens) - len(chosen) :]])
    assert next(remaining, None) is None
    formula(losses, cfg.algorithm.loss_agg_mode).backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=SGD_LR).step()
    moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    clipped = {name: torch.cat([t[name] for t in tokens]) for name in ("low", "high", "dual")}
    return {name: p.grad for name, p in model.named_parameters()}, moved, clipped


def far(left: Tensors, right: Tensors) -> dict[str, float]:
    """Tensors that are further apart than the bound, with the distance relative to `right`."""
    assert left.keys() == right.keys()
    distances = {name: float((left[name] - right[name]).norm() / right[name].norm()) for name in right}
    return {name: distance for name, distance in distances.items() if not distance <= BOUND}


OTHER_MODES = [mode for mode in LOSS_AGG_MODES if mode != AlgorithmConfig().loss_agg_mode]
KL_AND_ENTROPY = {"kl": KLConfig(estimator="k3", loss_coeff=0.1), "entropy_coeff": 0.02}


@pytest.mark.parametrize(
    ("algorithm", "splits", "clips"),
    [
        pytest.param({}, (1, 2, 4, 8, ONE_AT_A_TIME), ("low", "high", "dual"), id="token-mean"),
        # The mode is in the tokens' weights, which know of no split.
        *(pytest.param({"loss_agg_mode": m}, (1, 4), ("low", "high", "dual"), id=m) for m in OTHER_MODES),
        pytest.param(
            {
                "policy_loss": "gspo",
                "loss_agg_mode": "seq-mean-token-mean",
                "clip_ratio_low": 0.03,
                "clip_ratio_high": 0.04,
                **KL_AND_ENTROPY,
            },
            (1, 4, ONE_AT_A_TIME),
            ("low", "high"),
            id="gspo_kl_entropy",
        ),
        pytest.param(
            {"policy_loss": "cispo", **KL_AND_ENTROPY}, (1, 4, ONE_AT_A_TIME), ("low", "high"), id="cispo_kl_entropy"
        ),
    ],
)
def test_gradient_and_step_do_not_depend_on_the_split(
    pools: dict[int, ActorPool],
    model_dir: Path,
    reference_dir: Path,
    groups: list[Group],
    algorithm: dict[str, Any],
    splits: tuple[int, ...],
    clips: tuple[str, ...],
) -> None:
    cfg = config(model_dir, **algorithm)
    (sequences,) = build_batch(groups, cfg, version=0).minibatches
    assert 50 <= len(sequences) < 64
    *wanted, clipped = plain(model_dir, reference_dir, cfg, groups, sequences)
    assert all(0 < clipped[name].float().mean() < 0.5 for name in clips)

    cfg.model.path = str(reference_dir)  # read by the reference policy alone: the pools have their model
    found = {}
    for ranks, pool in pools.items():
        shares = zip(*(split(sequences, ranks, count) for count in splits), strict=True)
        works = [RankWork(version=0, minibatches=share, order=()) for share in shares]
        for reduce_each in (False, True):
            answers = on_all(pool, gradients_and_moves, [cfg] * ranks, works, [reduce_each] * ranks)
            for rank, answer in enumerate(answers):
                found |= {(ranks, rank, reduce_each, count): pair for count, pair in zip(splits, answer, strict=True)}
    assert len(found) == 3 * 2 * len(splits)
    for kind in (0, 1):  # gradient, move
        assert {key: far(pair[kind], wanted[kind]) for key, pair in found.items()} == dict.fromkeys(found, {})
        for (one, left), (other, right) in itertools.combinations(found.items(), 2):
            assert far(left[kind], right[kind]) == {}, (one, other)


def test_a_rank_without_tokens(
    pools: dict[int, ActorPool], model_dir: Path, reference_dir: Path, groups: list[Group]
) -> None:
    cfg = config(model_dir)
    (sequences,) = build_batch(groups[:1], cfg, version=0).minibatches
    alone = sequences[:1]
    model = reference(model_dir)
    (alone[0].token_weight * plain_tokens(model, alone[0], cfg.algorithm)["loss"].sum()).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    works = [RankWork(version=0, minibatches=((share,),), order=()) for share in (alone, ())]
    for ((found, _),) in on_all(pools[2], gradients_and_moves, [cfg] * 2, works, [False] * 2):
        assert far(found, wanted) == {}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({}, id="clip"),
        pytest.param({"policy_loss": "gspo", **KL_AND_ENTROPY}, id="gspo_kl_entropy"),
        pytest.param({"policy_loss": "cispo", **KL_AND_ENTROPY}, id="cispo_kl_entropy"),
    ],
)
def test_a_mini_batch_without_tokens_has_no_gradient(
    pools: dict[int, ActorPool], model_dir: Path, ranks: int, algorithm: dict[str, Any]
) -> None:
    cfg = config(model_dir, **algorithm)
    works = [RankWork(version=0, minibatches=(((), ()),), order=())] * ranks
    for ((gradients, moves),) in on_all(pools[ranks], gradients_and_moves, [cfg] * ranks, works, [False] * ranks):
        assert all(not t.any() for t in (*gradients.values(), *moves.values()))
