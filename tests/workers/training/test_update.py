"""The whole update on real FSDP ranks against plain torch: metrics, epochs, correction, KL, entropy, schedule, parity.

Every test builds the ranks anew.
"""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo.config.algorithm import CORRECTION_LEVELS, AlgorithmConfig, KLConfig, RolloutCorrectionConfig
from dapo.config.schema import Config
from dapo.packing import pack
from dapo.pools import BatchRefused
from dapo.schedule import learning_rates
from dapo.types import TrainBatch, TrainSequence
from tests.support.training.plain_reference import (
    LENGTHS,
    checksum,
    distance,
    full_weights,
    make_config,
    make_model,
    make_sequences,
    on_all,
    plain_logprobs,
    rank_checksum,
    reference,
    start_pool,
    train_batch,
    update,
    update_on,
)
from tests.support.training.plain_update import assert_update, mismatched
from workers.actor import ActorPool, split_batch
from workers.remote import RemoteError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

MAX_TOKENS = 48  # several micro-batches on both ranks
KL = KLConfig(estimator="k3", loss_coeff=0.2)
Started = tuple[ActorPool, Config]
ENGINES = {"rollout_correction": RolloutCorrectionConfig(use_rollout_logprobs=True)}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=False)


@dataclasses.dataclass
class Ranks:
    """Two ranks of the model in `model_dir`."""

    model_dir: Path

    def reset(self, algorithm: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
        """First state of another configuration, by section (`optim` is that of `actor`)."""
        cfg = configured(self.model_dir, AlgorithmConfig(**algorithm or {}), 2)
        cfg.actor.optim = dataclasses.replace(cfg.actor.optim, **sections.pop("optim", {}))
        of = {"actor": cfg.actor, "data": cfg.data, "rollout": cfg.rollout, "trainer": cfg.trainer}
        cfg = dataclasses.replace(cfg, **{k: dataclasses.replace(of[k], **v) for k, v in sections.items()})
        self.pool = start_pool(cfg)
        return cfg

    def update(self, version: int, *minibatches: tuple[TrainSequence, ...]) -> dict[str, float]:
        return update(self.pool, train_batch(version, *minibatches))

    def checksum(self) -> str:
        return checksum(self.pool)


def configured(model_dir: Path, algorithm: AlgorithmConfig, ranks: int) -> Config:
    cfg = make_config(model_dir, num_workers=ranks)
    cfg.actor.max_tokens_per_gpu = MAX_TOKENS
    cfg.algorithm = algorithm
    return cfg


@pytest.fixture
def ranks(model_dir: Path) -> Ranks:
    return Ranks(model_dir)


@pytest.fixture(params=[1, 2], ids=["one_rank", "two_ranks"])
def with_reference(model_dir: Path, request: pytest.FixtureRequest) -> Started:
    """Started with a coefficient of KL in the reward, or in the loss together with an entropy bonus."""
    in_reward = AlgorithmConfig(kl=KLConfig(reward_coeff=0.1))
    in_loss = AlgorithmConfig(kl=KL, entropy_coeff=0.05)
    cfg = configured(model_dir, {1: in_reward, 2: in_loss}[request.param], request.param)
    return start_pool(cfg), cfg


def corrected(mode: str, level: str) -> dict[str, Any]:
    lower, upper = (0.99, 1.01) if level == "geometric" else (0.9, 1.2)
    return {"rollout_correction": RolloutCorrectionConfig(mode=mode, level=level, lower=lower, upper=upper)}


def steps(metrics: dict[str, float]) -> dict[str, float]:
    return {kind: metrics[f"actor/{kind}_steps"] for kind in ("optimizer", "empty", "skipped")}


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({}, id="dapo"),
        pytest.param({"clip_ratio_c": 1.05, "clip_ratio_low": 0.02, "clip_ratio_high": 0.03}, id="every_clip"),
        pytest.param({"policy_loss": "gspo", "clip_ratio_low": 3e-3, "clip_ratio_high": 4e-3}, id="gspo"),
        pytest.param({"policy_loss": "cispo", "clip_ratio_low": 0.02, "clip_ratio_high": 0.03}, id="cispo"),
        *(pytest.param(corrected(m, x), id=f"{m}_{x}") for m in ("truncate", "mask") for x in CORRECTION_LEVELS),
        pytest.param({"entropy_top_share": 0.2}, id="high_entropy_tokens"),
        pytest.param({"entropy_top_share": 0.5, **ENGINES}, id="high_entropy_tokens_of_engines"),
        pytest.param(ENGINES, id="engines_logprobs"),
        *(pytest.param({"kl": dataclasses.replace(KL, estimator=e)}, id=f"kl_{e}") for e in ("k1", "k2", "k3")),
        pytest.param({"entropy_coeff": 0.5}, id="entropy_bonus"),
    ],
)
@pytest.mark.parametrize("order", [pytest.param((0,), id="one_step"), pytest.param((1, 0, 0, 1), id="two_epochs")])
def test_update_and_metrics_are_those_of_plain_torch(
    ranks: Ranks, model_dir: Path, algorithm: dict[str, Any], order: tuple[int, ...]
) -> None:
    cfg = ranks.reset(algorithm, optim={"lr": 1e-2})
    minibatches = tuple(mismatched(model_dir, seed) for seed in sorted(set(order)))
    metrics = assert_update(ranks.pool, cfg, TrainBatch(version=20, minibatches=minibatches, order=order))
    assert {f"parity/staleness_{k}/ess" for k in (0, 1, 4)} <= metrics.keys()
    correction = cfg.algorithm.rollout_correction
    off_policy = len(order) > 1 or correction.use_rollout_logprobs  # else every ratio is 1
    assert (metrics["actor/ratio_max"] > 1.0) == off_policy
    acted = {
        "actor/clip_fraction_low": off_policy and cfg.algorithm.clip_ratio_low < 0.1,
        "actor/clip_fraction_high": off_policy and cfg.algorithm.clip_ratio_high < 0.1,
        "actor/dual_clip_fraction": off_policy and cfg.algorithm.clip_ratio_c < 2,
        "actor/ref_kl": len(order) > 1 and bool(cfg.algorithm.kl.loss_coeff),
        "parity/corrected_share": correction.mode != "none",
    }
    assert [name for name, must in acted.items() if must and not metrics[name]] == []


def counted_update(worker: Any, work: Any) -> int:
    """Runs on a rank: forward passes of one update."""
    passes: list[None] = []
    hook = worker._policy.register_forward_hook(lambda *_: passes.append(None))
    update_on(worker, work)
    hook.remove()
    return len(passes)


def test_equal_logprobs_of_the_engines_only_spare_a_pass(ranks: Ranks, model_dir: Path) -> None:
    batch = train_batch(20, *(make_sequences(model_dir, LENGTHS, seed) for seed in (0, 1)))
    works = split_batch(batch, 2, 25)
    assert [len(minibatch) for minibatch in works[0].minibatches] == [2, 2]
    found = {}
    for use in (False, True):
        ranks.reset({"rollout_correction": RolloutCorrectionConfig(use_rollout_logprobs=use)})
        before = on_all(ranks.pool, full_weights)[0]
        assert on_all(ranks.pool, counted_update, works) == [4 if use else 8] * 2
        after = on_all(ranks.pool, full_weights)[0]
        found[use] = {name: after[name] - before[name] for name in before}
    assert distance(found[True], found[False]) <= 2e-5


def reference_digest(worker: Any) -> tuple[str, str] | None:
    """Runs on a rank: checksums of the reference policy and of the policy."""
    kept = worker._updater._reference
    return None if kept is None else (rank_checksum(worker, kept), rank_checksum(worker))


def test_reference_is_the_base_model_also_after_an_update(with_reference: Started, model_dir: Path) -> None:
    pool, cfg = with_reference
    sequences = make_sequences(model_dir, LENGTHS * 3, seed=5)
    ((base, policy),) = set(on_all(pool, reference_digest))
    assert base == policy
    metrics = assert_update(pool, cfg, train_batch(20, *(mismatched(model_dir, seed) for seed in (0, 1))))
    assert (metrics["actor/ref_kl"] > 0) == bool(cfg.algorithm.kl.loss_coeff)
    ((still, moved),) = set(on_all(pool, reference_digest))
    assert still == base and moved != policy

    packed = pack([len(s.token_ids) for s in sequences], cfg.actor.num_workers, MAX_TOKENS)
    assert len(packed[0]) > 2
    found = asyncio.run(pool.reference_logprobs(sequences))
    model = reference(model_dir)
    for logprobs, sequence in zip(found, sequences, strict=True):
        assert logprobs.dtype == np.float32
        with torch.no_grad():
            np.testing.assert_allclose(logprobs, plain_logprobs(model, sequence).numpy(), atol=2e-5)


def test_without_a_coefficient_there_is_no_reference(ranks: Ranks, model_dir: Path) -> None:
    ranks.reset()
    assert on_all(ranks.pool, reference_digest) == [None, None]
    with pytest.raises(RemoteError, match=r"the reference policy's .* no coefficient of `algorithm.kl` is set"):
        asyncio.run(ranks.pool.reference_logprobs(make_sequences(model_dir, LENGTHS)))


def test_an_empty_minibatch_takes_no_step(ranks: Ranks, model_dir: Path) -> None:
    """Momentum must not move the weights, nor may the step count towards Adam's bias correction."""
    first, second = (make_sequences(model_dir, LENGTHS, seed) for seed in (0, 1))
    second = tuple(dataclasses.replace(s, staleness=np.ones_like(s.staleness)) for s in second)  # the policy has moved
    checksums = []
    for empty in ((), ((), ())):
        ranks.reset()
        ranks.update(20, first)
        if empty:
            before = ranks.checksum()
            metrics = ranks.update(20, *empty)
            assert ranks.checksum() == before
            assert steps(metrics) == {"optimizer": 0, "empty": 2, "skipped": 0}
            assert metrics["actor/loss"] == metrics["actor/response_tokens"] == 0
        ranks.update(20, second)
        checksums.append(ranks.checksum())
    assert checksums[0] == checksums[1]
    assert steps(ranks.update(20, (), second, ())) == {"optimizer": 1, "empty": 2, "skipped": 0}


def test_every_optimizer_step_has_its_learning_rate(ranks: Ranks, model_dir: Path) -> None:
    cfg = ranks.reset(
        data={"train_batch_size": 4},
        actor={"ppo_mini_batch_size": 2, "ppo_epochs": 2},
        trainer={"total_steps": 3},
        optim={"lr_scheduler": "cosine", "lr_scheduler_unit": "optimizer_step", "lr_warmup_steps": 5, "lr": 1e-2},
    )
    rates = [learning_rates(cfg)(1, k) for k in range(4)]
    assert rates[0] == pytest.approx(1e-2) and len(set(rates)) == 4  # the fifth step of the run ends the warm-up
    minibatches = tuple(make_sequences(model_dir, LENGTHS, seed) for seed in (0, 1))
    metrics = assert_update(ranks.pool, cfg, TrainBatch(version=1, minibatches=minibatches, order=(0, 1, 1, 0)))
    assert metrics["actor/lr"] == rates[3]


FRESH = r"above `weight_sync.max_mean_logprob_diff` \(0.05\); nothing was trained .* Suspect "
STALE = r"above `algorithm.rollout_correction.max_mean_stale_logprob_diff` \(0.5\); nothing was trained .* Suspect "


@pytest.mark.parametrize(
    ("noise", "vllm", "message"),
    [
        pytest.param({"fresh": 0.3}, {}, FRESH + "the weight sync .* both sides compute in float32", id="weight_sync"),
        pytest.param(
            {"fresh": 0.3},
            {"dtype": "bfloat16"},
            FRESH + r"the compute types: `rollout.vllm.dtype` \(bfloat16\) against `model.dtype` \(float32\)",
            id="dtype",
        ),
        pytest.param({"stale": 3.0}, {}, STALE + "staleness: .* at least 1 updates old", id="staleness"),
    ],
)
@pytest.mark.parametrize(
    ("count", "algorithm"), [(1, {}), (2, {}), (2, ENGINES)], ids=["one_step", "two_steps", "engines_logprobs"]
)
def test_parity_error_names_its_suspect_and_nothing_is_trained(
    ranks: Ranks,
    model_dir: Path,
    noise: dict[str, float],
    vllm: dict[str, str],
    message: str,
    count: int,
    algorithm: dict[str, Any],
) -> None:
    ranks.reset(algorithm, rollout={"vllm": vllm})
    before = ranks.checksum()
    with pytest.raises(BatchRefused, match="WeightParityError: .*" + message):
        ranks.update(20, *(mismatched(model_dir, seed, **noise) for seed in range(count)))
    assert ranks.checksum() == before
