"""The whole update against plain torch: metrics, epochs, correction, KL, entropy, schedule, parity. On one rank in this
process; on several: test_parity.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo.algorithm.schedule import learning_rates
from dapo.config.algorithm import (
    AlgorithmConfig,
    ClipCovConfig,
    DppoConfig,
    GmpoConfig,
    KLConfig,
    KlCovConfig,
    RolloutCorrectionConfig,
)
from dapo.config.schema import Config
from dapo.types import TrainBatch, TrainSequence
from dapo.workers.actor import ActorWorker, RankWork
from dapo.workers.training.collective_errors import Refused
from dapo.workers.training.update import NonFiniteError, dice
from dapo.workers.training.update_metrics import Totals, WeightParityError
from tests.support.training.plain_reference import (
    LENGTHS,
    NeverWaits,
    distance,
    full_weights,
    make_config,
    make_sequences,
    rank_checksum,
    rebuild,
    stale,
    train_batch,
    update_here,
)
from tests.support.training.plain_update import assert_update, mismatched

KL = KLConfig(estimator="k3", loss_coeff=0.2)
ENGINES = {"rollout_correction": RolloutCorrectionConfig(use_rollout_logprobs=True)}


def reset(
    rank: ActorWorker, algorithm: dict[str, Any] | None = None, dtype: str = "float32", **sections: dict[str, Any]
) -> Config:
    """First state of another configuration, by section (`optim` is that of `actor`)."""
    cfg = make_config(Path(rank._cfg.model.path), num_workers=1, max_tokens_per_gpu=48)  # several micro-batches
    cfg.algorithm, cfg.model.dtype = AlgorithmConfig(**algorithm or {}), dtype
    cfg.actor.optim = dataclasses.replace(cfg.actor.optim, **sections.pop("optim", {}))
    cfg = dataclasses.replace(cfg, **{k: dataclasses.replace(getattr(cfg, k), **v) for k, v in sections.items()})
    rebuild(rank, cfg)
    return cfg


NARROW = DppoConfig(max_tv=0.01, max_kl=1e-3, max_ratio=1.2)
SOME = ClipCovConfig(share=0.1, lower=0.1, upper=2.0)
SEQUENCE_MASK = RolloutCorrectionConfig(off_policy_mask_threshold=0.02)
ALL_OF_ENGINES = RolloutCorrectionConfig(use_rollout_logprobs=True, off_policy_mask_threshold=0.02)


def reinforced(mode: str) -> dict[str, Any]:
    return {"rollout_correction": RolloutCorrectionConfig(mode=mode, use_rollout_logprobs=True)}


def corrected(mode: str, level: str) -> dict[str, Any]:
    lower, upper = (0.99, 1.01) if level == "geometric" else (0.9, 1.2)
    return {"rollout_correction": RolloutCorrectionConfig(mode=mode, level=level, lower=lower, upper=upper)}


def steps(metrics: dict[str, float]) -> dict[str, float]:
    return {kind: metrics[f"actor/{kind}_steps"] for kind in ("optimizer", "empty", "skipped")}


ONE_STEP, TWO_EPOCHS = (0,), (1, 0, 0, 1)


@pytest.mark.parametrize(
    ("order", "algorithm"),
    [
        pytest.param(ONE_STEP, {}, id="one_step"),
        pytest.param(TWO_EPOCHS, {}, id="two_epochs"),
        pytest.param(
            TWO_EPOCHS, {"clip_ratio_c": 1.05, "clip_ratio_low": 0.02, "clip_ratio_high": 0.03}, id="every_clip"
        ),
        pytest.param(TWO_EPOCHS, {"policy_loss": "gspo", "clip_ratio_low": 3e-3, "clip_ratio_high": 4e-3}, id="gspo"),
        pytest.param(TWO_EPOCHS, {"policy_loss": "cispo", "clip_ratio_low": 0.02, "clip_ratio_high": 0.03}, id="cispo"),
        pytest.param(TWO_EPOCHS, {"policy_loss": "sapo"}, id="sapo"),
        pytest.param(TWO_EPOCHS, {"policy_loss": "gmpo", "gmpo": GmpoConfig(low=0.02, high=0.03)}, id="gmpo"),
        pytest.param(TWO_EPOCHS, {"policy_loss": "dppo_tv", "dppo": NARROW, **ENGINES}, id="dppo_tv"),
        pytest.param(TWO_EPOCHS, {"policy_loss": "dppo_kl", "dppo": NARROW, **ENGINES}, id="dppo_kl"),
        pytest.param(ONE_STEP, {"policy_loss": "clip_cov", "clip_cov": SOME}, id="clip_cov_one_step"),
        pytest.param(TWO_EPOCHS, {"policy_loss": "clip_cov", "clip_cov": SOME, **ENGINES}, id="clip_cov_of_engines"),
        pytest.param(
            ONE_STEP,
            {"policy_loss": "kl_cov", "kl_cov": KlCovConfig(share=0.2), "entropy_top_share": 0.95, **ENGINES},
            id="kl_cov_of_engines_high_entropy",
        ),
        pytest.param(TWO_EPOCHS, {"policy_loss": "kl_cov", "kl_cov": KlCovConfig(share=0.2)}, id="kl_cov"),
        pytest.param(
            ONE_STEP, {"policy_loss": "kl_cov", "kl_cov": KlCovConfig(share=0.2), **ENGINES}, id="kl_cov_of_engines"
        ),
        pytest.param(TWO_EPOCHS, {"policy_loss": "reinforce", **reinforced("truncate")}, id="reinforce_truncate"),
        pytest.param(ONE_STEP, {"policy_loss": "reinforce", **reinforced("icepop")}, id="reinforce_icepop"),
        pytest.param(ONE_STEP, {"rollout_correction": RolloutCorrectionConfig(mode="icepop")}, id="icepop"),
        pytest.param(TWO_EPOCHS, {"rollout_correction": SEQUENCE_MASK}, id="off_policy_mask"),
        pytest.param(
            TWO_EPOCHS,
            {"policy_loss": "dppo_tv", "entropy_top_share": 0.5, "rollout_correction": ALL_OF_ENGINES},
            id="dppo_tv_high_entropy_off_policy_mask",
        ),
        pytest.param(ONE_STEP, corrected("truncate", "token"), id="truncate_token"),
        pytest.param(TWO_EPOCHS, corrected("mask", "sequence"), id="mask_sequence"),
        pytest.param(TWO_EPOCHS, corrected("mask", "geometric"), id="mask_geometric"),
        pytest.param(TWO_EPOCHS, {"entropy_top_share": 0.2}, id="high_entropy_tokens"),
        pytest.param(ONE_STEP, {"entropy_top_share": 0.5, **ENGINES}, id="high_entropy_tokens_of_engines"),
        pytest.param(ONE_STEP, ENGINES, id="engines_logprobs_one_step"),
        pytest.param(TWO_EPOCHS, ENGINES, id="engines_logprobs"),
        pytest.param(TWO_EPOCHS, {"kl": dataclasses.replace(KL, estimator="k1")}, id="kl_k1"),
        pytest.param(TWO_EPOCHS, {"kl": KL, "entropy_coeff": 0.05}, id="kl_k3_entropy"),
        pytest.param(ONE_STEP, {"entropy_coeff": 0.5}, id="entropy_bonus"),
    ],
)
def test_update_and_metrics_are_those_of_plain_torch(
    rank: ActorWorker,
    model_dir: Path,
    order: tuple[int, ...],
    algorithm: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the first micro-batch of an optimizer step to its totals the host never waits for the device."""
    cfg = reset(rank, algorithm, optim={"lr": 1e-2})
    step = rank._updater._forward_backward

    def watched(*args: Any) -> Totals:
        monkeypatch.undo()  # one step tells, and the watch is slow
        with NeverWaits():
            return step(*args)

    monkeypatch.setattr(rank._updater, "_forward_backward", watched)
    noise = 0.42 if cfg.algorithm.rollout_correction.mode == "icepop" else 0.3  # its bounds are wide
    minibatches = tuple(mismatched(model_dir, seed, stale=noise) for seed in sorted(set(order)))
    batch = TrainBatch(version=20, minibatches=minibatches, order=order)
    metrics = assert_update(update_here(rank, batch).metrics, [full_weights(rank)], cfg, batch)
    assert {f"parity/staleness_{k}/ess" for k in (0, 1, 4)} <= metrics.keys()
    correction = cfg.algorithm.rollout_correction
    off_policy = len(order) > 1 or correction.use_rollout_logprobs  # else every ratio is 1
    assert (metrics["actor/ratio_max"] > 1.0) == off_policy
    loss, narrow = cfg.algorithm.policy_loss, cfg.algorithm.dppo is NARROW and off_policy
    clips = loss == "gmpo" or (loss.startswith("dppo") and narrow)
    acted = {
        "actor/clip_fraction_low": clips or (off_policy and cfg.algorithm.clip_ratio_low < 0.1),
        "actor/clip_fraction_high": clips or (off_policy and cfg.algorithm.clip_ratio_high < 0.1),
        "actor/dual_clip_fraction": narrow or (off_policy and cfg.algorithm.clip_ratio_c < 2),
        "actor/left_out_fraction": (
            loss == "clip_cov" or correction.off_policy_mask_threshold or correction.mode == "icepop"
        ),
        "actor/ref_kl": len(order) > 1 and bool(cfg.algorithm.kl.loss_coeff),
        "parity/corrected_share": correction.mode != "none",
    }
    assert [name for name, must in acted.items() if must and not metrics[name]] == []


def test_numbers_that_choose_tokens_are_of_the_sequence_and_the_version(model_dir: Path) -> None:
    sequences = mismatched(model_dir, 0)
    alone = {s.token_ids.tobytes(): dice([s], 7) for s in sequences}
    together = dice(sequences[::-1], 7)
    assert torch.equal(together, torch.cat([alone[s.token_ids.tobytes()] for s in sequences[::-1]]))
    assert len(set(together.tolist())) == sum(len(s.rollout_logprobs) for s in sequences)
    assert not torch.isin(dice(sequences, 8), together).any() and len(dice([], 7)) == 0
    many = dice([dataclasses.replace(sequences[0], rollout_logprobs=np.zeros(10_000, np.float32))], 7)
    counts = torch.histc(many, 10, 0, 1)
    assert (counts - 1_000).abs().max() < 150  # five standard deviations


def test_equal_logprobs_of_the_engines_only_spare_a_pass(rank: ActorWorker, model_dir: Path) -> None:
    batch = train_batch(20, *(make_sequences(model_dir, LENGTHS, seed) for seed in (0, 1)))
    found = {}
    for use in (False, True):
        reset(rank, {"rollout_correction": RolloutCorrectionConfig(use_rollout_logprobs=use)})
        before = {name: tensor.clone() for name, tensor in full_weights(rank).items()}
        passes: list[None] = []
        hook = rank._policy.register_forward_hook(lambda *_, passes=passes: passes.append(None))
        update_here(rank, batch)
        hook.remove()
        assert len(passes) == (4 if use else 6)  # the first step needs none
        found[use] = {name: tensor - before[name] for name, tensor in full_weights(rank).items()}
    assert distance(found[True], found[False]) <= 2e-5


@pytest.mark.parametrize("algorithm", [{"kl": KL}, {"kl": KLConfig(reward_coeff=0.1)}], ids=["in_loss", "in_reward"])
def test_reference_is_the_base_model_also_after_an_update(
    rank: ActorWorker, model_dir: Path, algorithm: dict[str, Any]
) -> None:
    reset(rank, algorithm)
    base = rank_checksum(rank)
    assert rank_checksum(rank, rank._updater._reference) == base
    metrics = update_here(rank, train_batch(20, *(mismatched(model_dir, seed) for seed in (0, 1)))).metrics
    assert (metrics["actor/ref_kl"] > 0) == bool(algorithm["kl"].loss_coeff)
    assert rank_checksum(rank, rank._updater._reference) == base != rank_checksum(rank)


def test_the_reference_is_stored_in_the_compute_type_and_without_a_coefficient_there_is_none(
    rank: ActorWorker, model_dir: Path
) -> None:
    sequences = make_sequences(model_dir, LENGTHS)
    reset(rank, {"kl": KL}, dtype="bfloat16")
    assert {p.dtype for p in rank._updater._reference.parameters()} == {torch.bfloat16}
    own, theirs = (np.concatenate(rank.logprobs([sequences], reference=each)) for each in (False, True))
    assert abs(own).mean() > 0.1 and (own == theirs).all()
    reset(rank)
    assert rank._updater._reference is None
    with pytest.raises(Refused, match=r"no coefficient of `algorithm.kl` is set"):
        rank.logprobs([sequences], reference=True)


def test_an_empty_minibatch_takes_no_step(rank: ActorWorker, model_dir: Path) -> None:
    """Momentum must not move the weights, nor may the step count towards Adam's bias correction."""
    first, second = (make_sequences(model_dir, LENGTHS, seed) for seed in (0, 1))
    second = stale(second)
    checksums = []
    for empty in ((), ((), ())):
        reset(rank)
        update_here(rank, train_batch(20, first))
        if empty:
            before = rank_checksum(rank)
            metrics = update_here(rank, train_batch(20, *empty)).metrics
            assert rank_checksum(rank) == before
            assert steps(metrics) == {"optimizer": 0, "empty": 2, "skipped": 0}
            assert metrics["actor/loss"] == metrics["actor/response_tokens"] == 0
        update_here(rank, train_batch(20, second))
        checksums.append(rank_checksum(rank))
    assert checksums[0] == checksums[1]
    metrics = update_here(rank, train_batch(20, (), second, ())).metrics
    assert steps(metrics) == {"optimizer": 1, "empty": 2, "skipped": 0}


def test_every_optimizer_step_has_its_learning_rate(rank: ActorWorker, model_dir: Path) -> None:
    cfg = reset(
        rank,
        data={"train_batch_size": 4},
        actor={"ppo_mini_batch_size": 2, "ppo_epochs": 2},
        trainer={"total_steps": 3},
        optim={"lr_scheduler": "cosine", "lr_scheduler_unit": "optimizer_step", "lr_warmup_steps": 5, "lr": 1e-2},
    )
    rates = [learning_rates(cfg)(1, k) for k in range(4)]
    assert rates[0] == pytest.approx(1e-2) and len(set(rates)) == 4  # the fifth step of the run ends the warm-up
    minibatches = tuple(make_sequences(model_dir, LENGTHS, seed) for seed in (0, 1))
    batch = TrainBatch(version=1, minibatches=minibatches, order=(0, 1, 1, 0))
    metrics = assert_update(update_here(rank, batch).metrics, [full_weights(rank)], cfg, batch)
    assert metrics["actor/lr"] == rates[3]


FRESH = r"above `weight_sync.max_mean_logprob_diff` \(0.05\); nothing was trained .* Suspect "
STALE = r"above `algorithm.rollout_correction.max_mean_stale_logprob_diff` \(0.5\); nothing was trained .* Suspect "
TYPES = r"the compute types: `rollout.vllm.dtype` \(bfloat16\) against `model.dtype` \(float32\)"


@pytest.mark.parametrize(
    ("noise", "dtype", "message"),
    [
        pytest.param({"fresh": 0.3}, "", FRESH + "the weight sync .* both sides compute in float32", id="weight_sync"),
        pytest.param({"fresh": 0.3}, "bfloat16", FRESH + TYPES, id="dtype"),
        pytest.param({"stale": 3.0}, "", STALE + "staleness: .* at least 1 updates old", id="staleness"),
    ],
)
def test_parity_error_names_its_suspect_and_leaves_nothing_behind(
    rank: ActorWorker, model_dir: Path, noise: dict[str, float], dtype: str, message: str
) -> None:
    good = train_batch(20, make_sequences(model_dir, LENGTHS))
    for count, algorithm in ((1, {}), (2, {}), (2, ENGINES)):  # of one step, the gradient is there when it is refused
        sections: dict[str, Any] = {"rollout": {"vllm": {"dtype": dtype} if dtype else {}}}
        reset(rank, algorithm, **sections)
        update_here(rank, good)
        trained = rank_checksum(rank)
        reset(rank, algorithm, **sections)
        before = rank_checksum(rank)
        with pytest.raises(WeightParityError, match=message):
            update_here(rank, train_batch(20, *(mismatched(model_dir, seed, **noise) for seed in range(count))))
        assert rank_checksum(rank) == before
        update_here(rank, good)
        assert rank_checksum(rank) == trained


def first_with(sequences: tuple[TrainSequence, ...], **fields: Any) -> tuple[TrainSequence, ...]:
    return (dataclasses.replace(sequences[0], **fields), *sequences[1:])


def test_numbers_that_are_not_finite_skip_their_steps_and_are_named(rank: ActorWorker, model_dir: Path) -> None:
    good = make_sequences(model_dir, LENGTHS)
    tokens = len(good[0].rollout_logprobs)
    reset(rank)
    metrics = update_here(rank, train_batch(0, good)).metrics
    assert metrics["actor/skipped_steps"] == metrics["parity/non_finite_tokens"] == 0
    trained = rank_checksum(rank)
    for fields, named in (
        ({"rollout_logprobs": np.full(tokens, np.nan, np.float32)}, tokens),
        ({"rollout_logprobs": np.full(tokens, -np.inf, np.float32)}, tokens),
        ({"advantage": np.inf}, 0),
    ):
        reset(rank)
        updated = update_here(rank, train_batch(0, first_with(good, **fields), good))
        assert updated.skipped == (0,) and not updated.stop
        assert steps(updated.metrics) == {"optimizer": 1, "empty": 0, "skipped": 1}
        assert updated.metrics["parity/non_finite_tokens"] == named
        assert np.isfinite(updated.metrics["parity/mean_abs_logprob_diff"])
        assert rank_checksum(rank) == trained and rank._version.version == 1, "such an update counts"


def test_log_probabilities_of_the_actors_that_are_not_finite_skip_every_step(
    rank: ActorWorker, model_dir: Path
) -> None:
    for count in (1, 2):  # with two steps there is a pass before the first
        reset(rank)
        rank._policy.model.get_parameter("model.norm.weight").detach().to_local()[:1] = np.nan
        before = rank_checksum(rank)
        updated = update_here(rank, train_batch(0, *[make_sequences(model_dir, LENGTHS)] * count))
        assert updated.skipped == tuple(range(count)) and rank_checksum(rank) == before
        assert updated.metrics["parity/non_finite_tokens"] == count * sum(response for _, response in LENGTHS)


def test_three_skipped_steps_in_a_row_stop_and_the_rank_still_saves(
    rank: ActorWorker, model_dir: Path, tmp_path: Path
) -> None:
    good = make_sequences(model_dir, LENGTHS)
    bad = first_with(good, advantage=np.inf)
    reset(rank)
    before = rank_checksum(rank)
    with pytest.raises(NonFiniteError, match="3 optimizer steps in a row were skipped"):
        update_here(rank, train_batch(0, bad, bad, bad, good))
    assert rank_checksum(rank) == before
    rank.save(str(tmp_path / "zero"), 0)
    update_here(rank, train_batch(0, good))  # ends the row
    reset(rank)
    updated = update_here(rank, train_batch(0, good, bad, bad, bad, good))
    assert updated.skipped == (1, 2, 3) and "3 optimizer steps in a row" in updated.stop
    assert updated.metrics["actor/optimizer_steps"] == 1, "none is taken after them"
    rank.save(str(tmp_path / "one"), 1)


def test_saved_state_continues_bit_for_bit(rank: ActorWorker, model_dir: Path, tmp_path: Path) -> None:
    batches = [train_batch(v, stale(make_sequences(model_dir, LENGTHS, seed=v))) for v in range(2)]
    state = str(tmp_path / "state")
    reset(rank)
    update_here(rank, batches[0])
    rank.save(state, 1)
    saved = rank_checksum(rank)
    update_here(rank, batches[1])
    continued = rank_checksum(rank)
    for anew in (False, True):
        if anew:
            reset(rank)
        rank.load(state, 1)
        assert rank_checksum(rank) == saved != continued
        update_here(rank, batches[1])
        assert rank_checksum(rank) == continued
    with pytest.raises(Refused, match=r"an update of policy version 1: they are at version 2"):
        rank.update(RankWork(version=1, minibatches=((),), order=(0,)))
    with pytest.raises(Refused, match=r"a checkpoint of policy version 1: they are at version 2"):
        rank.save(str(tmp_path / "other"), 1)
    reset(rank, optim={"betas": [0.5, 0.75], "weight_decay": 0.5})
    rank.load(state, 1)
    [group] = rank._optimizer.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.75), 0.5), "settings are those of the configuration"
