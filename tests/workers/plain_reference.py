"""Tiny models, and the whole update on them written out again in plain transformers, one sequence at a time."""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from dapo.algorithm_config import AlgorithmConfig, RolloutCorrectionConfig
from dapo.config import Config
from dapo.schedule import learning_rates
from dapo.types import TrainBatch, TrainSequence
from workers.actor import ActorPool, RankWork
from workers.remote import wait

VOCABULARY = 64
TEMPERATURE = 0.7
LENGTHS = ((5, 9), (3, 1), (7, 14), (2, 6), (4, 4), (6, 11), (3, 8))  # (prompt, response)


def make_model(directory: Path, *, tied: bool, seed: int = 1) -> Path:
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        attention_dropout=0.5,  # must not act
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # biases and norms are constants otherwise
    model.save_pretrained(directory)
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")))
    tokenizer.save_pretrained(directory)
    return directory


def make_config(model: Path, **actor: Any) -> Config:
    cfg = Config()
    cfg.model.path = str(model)
    cfg.model.dtype = "float32"
    cfg.model.gradient_checkpointing = "none"
    cfg.rollout.temperature = TEMPERATURE
    cfg.actor = dataclasses.replace(cfg.actor, max_tokens_per_gpu=64, **actor)
    cfg.actor.optim.lr = 3e-3
    cfg.actor.optim.eps = 1e-3  # Adam's first step is else the sign of the gradient, rounding included
    cfg.actor.optim.grad_clip = 0.05
    return cfg


def reference(model_dir: Path) -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def plain_logprobs(model: Qwen2ForCausalLM, sequence: TrainSequence) -> torch.Tensor:
    """[R] of one sequence on its own."""
    tokens = torch.from_numpy(sequence.token_ids).long()
    logits = model(tokens[None]).logits[0, sequence.num_prompt_tokens - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, tokens[sequence.num_prompt_tokens :, None])[:, 0]


def make_sequences(model_dir: Path, lengths: Sequence[tuple[int, int]], seed: int = 0) -> tuple[TrainSequence, ...]:
    """Random sequences whose rollout log-probabilities are the model's own."""
    rng = np.random.default_rng(seed)
    model = reference(model_dir)
    total = sum(response for _, response in lengths)
    sequences = []
    for prompt, response in lengths:
        draft = TrainSequence(
            token_ids=rng.integers(2, VOCABULARY, prompt + response).astype(np.int32),
            num_prompt_tokens=prompt,
            rollout_logprobs=np.zeros(response, np.float32),
            advantage=float(rng.normal()),
            token_weight=1 / total,
            staleness=np.zeros(response, np.int32),
        )
        with torch.no_grad():
            own = plain_logprobs(model, draft).numpy()
        sequences.append(dataclasses.replace(draft, rollout_logprobs=own))
    return tuple(sequences)


def train_batch(version: int, *minibatches: tuple[TrainSequence, ...]) -> TrainBatch:
    """One epoch, in order."""
    return TrainBatch(version=version, minibatches=minibatches, order=tuple(range(len(minibatches))))


def plain_loss(
    model: Qwen2ForCausalLM, sequences: Sequence[TrainSequence], old: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """DAPO's objective, written out again; `old` are log-probabilities per sequence."""
    loss = torch.zeros(())
    for i, sequence in enumerate(sequences):
        logprobs = plain_logprobs(model, sequence)
        ratio = torch.exp(logprobs - (logprobs.detach() if old is None else old[i]))
        surrogate = torch.minimum(ratio * sequence.advantage, ratio.clamp(0.8, 1.28) * sequence.advantage)
        loss = loss - sequence.token_weight * surrogate.sum()
    return loss


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of what is wanted, over all tensors."""
    assert found.keys() == wanted.keys()
    difference = math.fsum(float((found[name] - wanted[name]).double().square().sum()) for name in wanted)
    return math.sqrt(difference / math.fsum(float(t.double().square().sum()) for t in wanted.values()))


def full_gradients(worker: Any, work: RankWork) -> dict[str, torch.Tensor]:
    """Runs on a rank: the gradient that one optimizer step would use."""
    batches = [worker._updater._collate(sequences) for sequences in work.minibatches[0]]
    worker._updater._forward_backward(batches, None, None)
    gradients = {name: p.grad.full_tensor() for name, p in worker._policy.model.named_parameters()}
    worker._optimizer.zero_grad()
    return gradients


def reconfigure(worker: Any, cfg: Config) -> None:
    """Runs on a rank: what `start` would make of `cfg`, around the shards and the optimizer that are there."""
    from workers.update import Updater

    kl = cfg.algorithm.kl
    reference = worker._fsdp.load_reference(cfg, worker._mesh) if kl.loss_coeff or kl.reward_coeff else None
    worker._policy.entropy_gradient = cfg.algorithm.entropy_coeff != 0
    worker._optimizer.zero_grad()
    worker._updater = Updater(worker._policy, reference, worker._optimizer, cfg, worker._mesh)


def full_weights(worker: Any) -> dict[str, torch.Tensor]:
    """Runs on a rank."""
    return dict(worker.named_full_parameters())


def start_pool(cfg: Config) -> ActorPool:
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    pool = ActorPool(cfg, "cpu", [options] * cfg.actor.num_workers)
    asyncio.run(pool.start())
    return pool


def on_all(pool: ActorPool, function: Callable[..., Any], *args: Sequence[Any]) -> list[Any]:
    """function(worker, *args of the rank) on every rank."""
    refs = [w.__ray_call__.remote(function, *own) for w, *own in zip(pool._workers, *args, strict=True)]
    return asyncio.run(wait(refs, 120, "a test", "none"))


def plain_tokens(
    model: Qwen2ForCausalLM,
    sequence: TrainSequence,
    algorithm: AlgorithmConfig,
    old: torch.Tensor | None = None,
    ref: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Everything about the R tokens of one response, each [R]; "loss" has a gradient and is not weighted yet.

    old: log-probabilities before the update (by default the model's own); ref: of the reference policy.
    """
    tokens = torch.from_numpy(sequence.token_ids).long()
    logits = model(tokens[None]).logits[0, sequence.num_prompt_tokens - 1 : -1] / TEMPERATURE
    distribution = logits.log_softmax(-1)
    logprobs = distribution.gather(1, tokens[sequence.num_prompt_tokens :, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    old = logprobs.detach() if old is None else old
    rollout, staleness = torch.from_numpy(sequence.rollout_logprobs), torch.from_numpy(sequence.staleness)
    found = _plain_correction(old - rollout, algorithm.rollout_correction)
    if algorithm.rollout_correction.use_rollout_logprobs:
        old = rollout
    policy, found["low"], found["high"], found["dual"] = _plain_policy(logprobs, old, sequence.advantage, algorithm)
    found["loss"] = policy * found["correction"] - algorithm.entropy_coeff * entropy
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
    logprobs: torch.Tensor, old: torch.Tensor, advantage: float, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss per token; where lower bound, upper bound and dual clip act."""
    floor, ceiling, cap = 1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high, algorithm.clip_ratio_c
    ratio = torch.exp(logprobs - old)
    nowhere = torch.zeros(len(ratio), dtype=torch.bool)
    if algorithm.policy_loss == "cispo":
        return -advantage * ratio.detach().clamp(floor, ceiling) * logprobs, ratio < floor, ratio > ceiling, nowhere
    if algorithm.policy_loss == "gspo":
        ratio, cap = torch.exp((logprobs - old).mean()).repeat(len(ratio)), math.inf
    if advantage > 0:
        return -advantage * ratio.clamp(max=ceiling), nowhere, ratio > ceiling, nowhere
    return -advantage * ratio.clamp(floor, cap), ratio < floor, nowhere, ratio > cap


def _plain_correction(difference: torch.Tensor, cfg: RolloutCorrectionConfig) -> dict[str, torch.Tensor]:
    importance = torch.exp(difference.sum().repeat(len(difference)) if cfg.level == "sequence" else difference)
    low, high = {"none": (0.0, math.inf), "truncate": (0.0, cfg.upper), "mask": (cfg.lower, cfg.upper)}[cfg.mode]
    affected = (importance < low) | (importance > high)
    correction = {
        "none": torch.ones_like(importance),
        "truncate": importance.clamp(max=high),
        "mask": torch.where(affected, 0.0, importance),
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
    losses, norms, trained = [], [], []
    for step, k in enumerate(batch.order):
        tokens = [
            plain_tokens(model, sequence, algorithm, first["logprobs"], ref)
            for sequence, first, ref in zip(batch.minibatches[k], before[k], refs[k], strict=True)
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
        **_plain_parity(_joined([t for k in checked for t in before[k]])),
    }


def _joined(tokens: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([t[name].detach() for t in tokens]).double() for name in tokens[0]}


def _plain_means(tokens: dict[str, torch.Tensor]) -> dict[str, float]:
    ratio = tokens["log_ratio"].exp()
    values = {
        "clip_fraction": tokens["low"] + tokens["high"],
        "clip_fraction_low": tokens["low"],
        "clip_fraction_high": tokens["high"],
        "dual_clip_fraction": tokens["dual"],
        "approx_kl": -tokens["log_ratio"],
        "ratio_mean": ratio,
        "ref_kl": tokens["ref_kl"],
        "entropy": tokens["entropy"],
    }
    return {f"actor/{name}": float(v.mean()) for name, v in values.items()} | {"actor/ratio_max": float(ratio.max())}


def _plain_parity(tokens: dict[str, torch.Tensor]) -> dict[str, float]:
    """Over all tokens; and, where some are stale, per staleness, 4 or older together."""
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
