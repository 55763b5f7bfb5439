"""The whole update written out again in plain torch, one sequence at a time, and the comparison with the ranks'."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from dapo.algorithm.schedule import learning_rates
from dapo.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from dapo.config.schema import Config
from dapo.types import TrainBatch, TrainSequence
from dapo.workers.training.update import dice
from tests.support.training.plain_reference import (
    LENGTHS,
    TEMPERATURE,
    distance,
    in_turns,
    make_sequences,
    plain_logprobs,
    reference,
    sampled,
)


def plain_tokens(
    model: Qwen2ForCausalLM,
    sequence: TrainSequence,
    algorithm: AlgorithmConfig,
    old: torch.Tensor | None = None,
    ref: torch.Tensor | None = None,
    kept: torch.Tensor | float = 1.0,
    chosen: torch.Tensor | float = 0.0,
) -> dict[str, torch.Tensor]:
    """Everything about the tokens that the policy sampled, each [S]; "loss" has a gradient and is not weighted yet.

    old: log-probabilities before the update (by default the model's own); ref: of the reference policy; kept: 1 where a
    token carries the policy loss, else 0; chosen: 1 where `kl_cov` holds a token, else 0.
    """
    tokens = torch.from_numpy(sequence.token_ids).long()
    logits = model(tokens[None]).logits[0, sequence.num_prompt_tokens - 1 : -1] / TEMPERATURE
    distribution = logits.log_softmax(-1)
    logprobs = distribution.gather(1, tokens[sequence.num_prompt_tokens :, None])[:, 0][sampled(sequence)]
    entropy = -(distribution.exp() * distribution).sum(-1)[sampled(sequence)]
    old = logprobs.detach() if old is None else old
    rollout, staleness = torch.from_numpy(sequence.rollout_logprobs), torch.from_numpy(sequence.staleness)
    found = _plain_correction(old - rollout, algorithm.rollout_correction)
    if algorithm.rollout_correction.use_rollout_logprobs:
        old = rollout
    policy, found["low"], found["high"], found["dual"] = _plain_policy(
        logprobs, old, sequence.advantage, algorithm, chosen
    )
    threshold = algorithm.rollout_correction.off_policy_mask_threshold or math.inf
    left = sequence.advantage < 0 and float((rollout - logprobs.detach()).mean()) > threshold
    factor = found["correction"] * kept * (0.0 if left else 1.0)
    found["left_out"] = factor == 0
    found["loss"] = policy * factor - algorithm.entropy_coeff * entropy
    found["ref_kl"] = torch.zeros_like(rollout)
    if ref is not None:
        gap = logprobs - ref
        estimates = {"k1": gap, "k2": gap**2 / 2, "k3": (torch.exp(-gap) - 1 + gap).clamp(max=10)}
        found["ref_kl"] = estimates[algorithm.kl.estimator].detach()
        through = gap**2 / 2 - (gap**2 / 2).detach()  # whatever the estimate, the gradient is k2's
        found["loss"] = found["loss"] + algorithm.kl.loss_coeff * (found["ref_kl"] + through)
    detached = {"staleness": staleness, "logprobs": logprobs, "entropy": entropy, "log_ratio": logprobs - old}
    return found | {name: values.detach() for name, values in detached.items()}


def _plain_policy(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantage: float,
    algorithm: AlgorithmConfig,
    chosen: torch.Tensor | float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss per token; where lower bound, upper bound and dual clip act."""
    floor, ceiling, cap = 1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high, algorithm.clip_ratio_c
    ratio = torch.exp(logprobs - old)
    nowhere = torch.zeros(len(ratio), dtype=torch.bool)
    if algorithm.policy_loss == "cispo":
        return -advantage * ratio.detach().clamp(floor, ceiling) * logprobs, ratio < floor, ratio > ceiling, nowhere
    match algorithm.policy_loss:
        case "sapo":
            tau = algorithm.sapo.tau_positive if advantage > 0 else algorithm.sapo.tau_negative
            return -advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1))), nowhere, nowhere, nowhere
        case "gmpo":
            least, most = math.exp(-algorithm.gmpo.low), math.exp(algorithm.gmpo.high)
            low, high = (nowhere, ratio > most) if advantage > 0 else (ratio < least, nowhere)
            bounded = ratio.clamp(max=most) if advantage > 0 else ratio.clamp(min=least)
            return -advantage * (bounded.prod() ** (1 / len(ratio))).repeat(len(ratio)), low, high, nowhere
        case "dppo_tv" | "dppo_kl":
            p, q = logprobs.detach().double().exp(), old.double().exp()
            kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
            far = (
                (p - q).abs() > algorithm.dppo.max_tv
                if algorithm.policy_loss == "dppo_tv"
                else (kl > algorithm.dppo.max_kl)
            )
            low, high = (nowhere, far & (p > q)) if advantage > 0 else (far & (p < q), nowhere)
            capped = ratio.detach().clamp(max=algorithm.dppo.max_ratio)
            dual = (capped < ratio) & ~low & ~high
            return torch.where(low | high, 0.0, -advantage * capped * logprobs), low, high, dual
        case "kl_cov":
            held = algorithm.kl_cov.coeff * (logprobs - old).abs() * chosen
            return -advantage * ratio + held, nowhere, nowhere, nowhere
        case "reinforce":
            return -advantage * logprobs, nowhere, nowhere, nowhere
    if algorithm.policy_loss == "gspo":
        ratio, cap = torch.exp((logprobs - old).mean()).repeat(len(ratio)), math.inf
    if advantage > 0:
        return -advantage * ratio.clamp(max=ceiling), nowhere, ratio > ceiling, nowhere
    return -advantage * ratio.clamp(floor, cap), ratio < floor, nowhere, ratio > cap


def _plain_correction(difference: torch.Tensor, cfg: RolloutCorrectionConfig) -> dict[str, torch.Tensor]:
    of_response = {"sequence": difference.sum(), "geometric": difference.mean()}
    together = of_response.get(cfg.level)
    importance = torch.exp(difference if together is None else together.repeat(len(difference)))
    low, high = {
        "none": (0.0, math.inf),
        "truncate": (0.0, cfg.upper),
        "mask": (cfg.lower, cfg.upper),
        "icepop": (0.5, 5.0),
    }[cfg.mode]
    affected = (importance < low) | (importance > high)
    correction = {
        "none": torch.ones_like(importance),
        "truncate": importance.clamp(max=high),
        "mask": torch.where(affected, 0.0, importance),
        "icepop": torch.where(affected, 0.0, importance),
    }[cfg.mode]
    return {"difference": difference, "importance": importance, "affected": affected, "correction": correction}


def plain_update(
    model: Qwen2ForCausalLM, cfg: Config, batch: TrainBatch, base: Qwen2ForCausalLM | None = None
) -> dict[str, float]:
    """The whole update of `model` in place by plain torch; the metrics of it. base: the reference policy."""
    algorithm, optim = cfg.algorithm, cfg.actor.optim
    rate = learning_rates(cfg)
    betas = tuple(optim.betas)
    adamw = torch.optim.AdamW(model.parameters(), betas=betas, eps=optim.eps, weight_decay=optim.weight_decay)
    with torch.no_grad():
        before = [[plain_tokens(model, s, algorithm) for s in sequences] for sequences in batch.minibatches]
        refs = [[plain_logprobs(base, s) if base else None for s in sequences] for sequences in batch.minibatches]
    bounds = [_entropy_bound(tokens, algorithm.entropy_top_share) for tokens in before]
    chosen = [
        _chosen(sequences, tokens, algorithm, batch.version)
        for sequences, tokens in zip(batch.minibatches, before, strict=True)
    ]
    losses, norms, trained = [], [], []
    for step, k in enumerate(batch.order):
        old = [None if algorithm.rollout_correction.use_rollout_logprobs else t["logprobs"] for t in before[k]]
        tokens = [
            plain_tokens(
                model,
                sequence,
                algorithm,
                old,
                ref,
                (first["entropy"] >= bounds[k]) & ~(mine & (algorithm.policy_loss == "clip_cov")),
                mine,
            )
            for sequence, first, old, ref, mine in zip(
                batch.minibatches[k], before[k], old, refs[k], chosen[k], strict=True
            )
        ]
        weights = [sequence.token_weight for sequence in batch.minibatches[k]]
        loss = sum(weight * t["loss"].sum() for weight, t in zip(weights, tokens, strict=True))
        adamw.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)))
        adamw.param_groups[0]["lr"] = rate(batch.version, step)
        adamw.step()
        losses.append(float(loss.detach()))
        trained += tokens
    # With the engine's log-probabilities nobody computes those of later mini-batches before the first step.
    checked = batch.order[:1] if algorithm.rollout_correction.use_rollout_logprobs else range(len(before))
    return {
        "actor/loss": float(np.mean(losses)),
        "actor/grad_norm": float(np.mean(norms)),
        "actor/lr": adamw.param_groups[0]["lr"],
        "actor/response_tokens": sum(len(t["loss"]) for tokens in before for t in tokens),
        "actor/optimizer_steps": len(batch.order),
        "actor/skipped_steps": 0,
        "actor/empty_steps": 0,
        **_plain_means(_joined(trained)),
        "parity/non_finite_tokens": 0,
        **_plain_parity(_joined([t for k in checked for t in before[k]])),
    }


def _entropy_bound(tokens: Sequence[dict[str, torch.Tensor]], share: float) -> float:
    """The lowest entropy of the share of a mini-batch's tokens with the highest."""
    highest = sorted((float(entropy) for t in tokens for entropy in t["entropy"]), reverse=True)
    return highest[math.ceil(share * len(highest)) - 1]


def _chosen(
    sequences: Sequence[TrainSequence],
    tokens: Sequence[dict[str, torch.Tensor]],
    algorithm: AlgorithmConfig,
    version: int,
) -> list[torch.Tensor]:
    """The tokens that `clip_cov` or `kl_cov` takes in a mini-batch, from a table with a row for each of its tokens."""
    nothing = [torch.zeros(len(t["logprobs"]), dtype=torch.bool) for t in tokens]
    if algorithm.policy_loss not in ("clip_cov", "kl_cov"):
        return nothing
    rows = []
    for i, (sequence, t) in enumerate(zip(sequences, tokens, strict=True)):
        known = t["logprobs"].tolist()
        if algorithm.rollout_correction.use_rollout_logprobs:
            known = sequence.rollout_logprobs.tolist()
        rows += [
            (logprob, float(np.float32(sequence.advantage)), number, i, j)
            for j, (logprob, number) in enumerate(zip(known, dice([sequence], version).tolist(), strict=True))
        ]
    logprob, advantage = (sum(row[column] for row in rows) / len(rows) for column in (0, 1))
    of = {(i, j): (x - logprob) * (a - advantage) for x, a, _, i, j in rows}
    if algorithm.policy_loss == "clip_cov":
        between = [row for row in rows if algorithm.clip_cov.lower < of[row[3:]] < algorithm.clip_cov.upper]
        ranked, share = sorted(between, key=lambda row: -row[2]), algorithm.clip_cov.share
    else:
        positive = [row for row in rows if of[row[3:]] > 0]
        ranked, share = sorted(positive, key=lambda row: -of[row[3:]]), algorithm.kl_cov.share
    for *_, i, j in ranked[: max(1, math.ceil(share * len(rows)))]:
        nothing[i][j] = True
    return nothing


def _joined(tokens: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([t[name].detach() for t in tokens]).double() for name in tokens[0]}


def _plain_means(tokens: dict[str, torch.Tensor]) -> dict[str, float]:
    ratio = tokens["log_ratio"].exp()
    values = {
        "clip_fraction": tokens["low"] + tokens["high"],
        "clip_fraction_low": tokens["low"],
        "clip_fraction_high": tokens["high"],
        "dual_clip_fraction": tokens["dual"],
        "left_out_fraction": tokens["left_out"],
        "approx_kl": -tokens["log_ratio"],
        "ratio_mean": ratio,
        "ref_kl": tokens["ref_kl"],
        "entropy": tokens["entropy"],
    }
    return {f"actor/{name}": float(v.mean()) for name, v in values.items()} | {"actor/ratio_max": float(ratio.max())}


def _plain_parity(tokens: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the mismatch over all tokens; and, where some are stale, per staleness, 4 or older together."""
    staleness = tokens["staleness"].int().clamp(max=4)
    chosen = {"parity": staleness >= 0}
    if bool((staleness > 0).any()):
        chosen |= {f"parity/staleness_{age}": staleness == age for age in staleness.unique().tolist()}
    metrics = {}
    for prefix, mask in chosen.items():
        importance = tokens["importance"][mask]
        metrics |= {
            f"{prefix}/mean_abs_logprob_diff": float(tokens["difference"][mask].abs().mean()),
            f"{prefix}/max_abs_logprob_diff": float(tokens["difference"][mask].abs().max()),
            f"{prefix}/ess": float(importance.sum() ** 2 / (len(importance) * (importance**2).sum())),
            f"{prefix}/corrected_share": float(tokens["affected"][mask].mean()),
        }
    return metrics


def mismatched(model_dir: Path, seed: int, *, fresh: float = 0.02, stale: float = 0.3) -> tuple[TrainSequence, ...]:
    """Tokens of staleness 0, 1 and 7, within responses too; engines off by noise of these sizes, in nats. Every other
    response holds tokens that the policy did not sample."""
    rng = np.random.default_rng(seed + 100)
    made = []
    for index, sequence in enumerate(make_sequences(model_dir, LENGTHS + LENGTHS, seed)):
        staleness = np.zeros(len(sequence.rollout_logprobs), np.int32)
        staleness[: len(staleness) // 2] = (0, 1, 7)[index % 3]
        size = np.where(staleness > 0, stale, fresh)
        logprobs = (sequence.rollout_logprobs + size * rng.normal(size=len(staleness))).astype(np.float32)
        advantage = sequence.advantage * (1 + index % 2)
        made.append(dataclasses.replace(sequence, rollout_logprobs=logprobs, staleness=staleness, advantage=advantage))
    return in_turns(made)


def assert_update(
    updated: dict[str, float], weights: Sequence[dict[str, torch.Tensor]], cfg: Config, batch: TrainBatch
) -> dict[str, float]:
    """An update of the model in its first state is plain torch's: every metric, and the way that the weights go.

    updated: its metrics; weights: of each rank after it.
    """
    model, base = reference(Path(cfg.model.path)), reference(Path(cfg.model.path))
    metrics = {name: value for name, value in updated.items() if not name.startswith("perf/")}
    wanted = plain_update(model, cfg, batch, base if cfg.algorithm.kl.loss_coeff else None)
    before, after = dict(base.named_parameters()), dict(model.named_parameters())
    with torch.no_grad():
        way = {name: after[name] - before[name] for name in before}
        for found in weights:
            assert distance({name: found[name] - before[name] for name in before}, way) <= 2e-5
    assert metrics.keys() == wanted.keys()
    assert metrics == pytest.approx(wanted, rel=1e-3, abs=2e-6)
    return metrics
