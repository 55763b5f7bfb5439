"""Compares dapo's losses with those of verl, TRL and polgrad on random responses: prints a JSON object with the largest
relative difference of loss and gradient for each comparison. Run it where these packages can be imported."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dapo.algorithm.objective import Constants, objective, off_policy_mask, rollout_correction
from dapo.config.algorithm import (
    AlgorithmConfig,
    ClipCovConfig,
    DppoConfig,
    KlCovConfig,
    RolloutCorrectionConfig,
    SapoConfig,
)
from dapo.loss import token_weights
from dapo.types import TrainSequence
from dapo.workers.training.forward.policy import collate
from dapo.workers.training.mesh import SequenceParallel
from dapo.workers.training.update import Updater

LENGTHS = torch.tensor([8, 3, 5, 1, 8, 5, 6, 4])  # 40 tokens
ROWS, COLUMNS = len(LENGTHS), 8
MASK = (torch.arange(COLUMNS) < LENGTHS[:, None]).double()
IDS = torch.arange(ROWS)[:, None].expand(ROWS, COLUMNS)[MASK.bool()]
Loss = Callable[..., Tensor]


def responses(seed: int) -> dict[str, Tensor]:
    """Log-probabilities of the policy and of the one that sampled, [ROWS, COLUMNS]; an advantage for each row."""
    generator = torch.Generator().manual_seed(seed)
    old = -2.5 * torch.rand(ROWS, COLUMNS, dtype=torch.float64, generator=generator) - 0.01
    new = (old + 0.6 * torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=generator)).clamp(max=-1e-3)
    advantages = torch.randn(ROWS, dtype=torch.float64, generator=generator).float().double()
    return {"logprobs": new, "old": old, "advantages": advantages}


def ours(
    cfg: AlgorithmConfig,
    mode: str,
    *,
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor = MASK,
    factor: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """The objective on the responses laid end to end. factor: of the policy loss per token."""
    inside, lengths = mask.bool(), mask.sum(dim=1).long()
    ids = torch.arange(len(lengths))[:, None].expand_as(inside)[inside]
    weights = token_weights(lengths, mode, group_sizes=[len(lengths)], max_response_length=mask.shape[1]).double()
    new = logprobs[inside]
    constants = Constants(
        old_logprobs=old[inside],
        ref_logprobs=None,
        correction=torch.ones_like(new) if factor is None else factor,
        advantages=advantages[ids],
        weights=weights[ids],
        segment_ids=ids,
        chosen=chosen,
    )
    return objective(new, torch.zeros_like(new), constants, cfg).loss


def chosen_of(cfg: AlgorithmConfig, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The tokens that `clip_cov` or `kl_cov` chooses, [R]; one rank."""
    sequences = [
        TrainSequence(
            token_ids=np.arange(row, row + length + 1, dtype=np.int32),
            num_prompt_tokens=1,
            rollout_logprobs=np.zeros(length, np.float32),
            advantage=float(advantages[row]),
            token_weight=1.0,
            staleness=np.zeros(length, np.int32),
        )
        for row, length in enumerate(LENGTHS.tolist())
    ]
    rank = SimpleNamespace(
        _cfg=SimpleNamespace(algorithm=cfg), _mesh=SimpleNamespace(sequence_parallel=SequenceParallel())
    )
    batch = collate(sequences, torch.device("cpu"))
    [chosen] = Updater._by_covariance(rank, 0, [sequences], [batch], [logprobs[MASK.bool()]])  # type: ignore[arg-type]
    return chosen.double()


def of_verl() -> Iterator[tuple[str, Loss, Loss]]:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config.actor import FSDPActorConfig, PolicyLossConfig

    def theirs(name: str, mode: str, *, policy_loss: dict[str, Any] | None = None, **settings: Any) -> Loss:
        cfg = FSDPActorConfig(
            use_dynamic_bsz=True, rollout_n=2, policy_loss=PolicyLossConfig(**policy_loss or {}), **settings
        )

        def loss(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
            wide = advantages[:, None].expand_as(logprobs)
            return get_policy_loss_fn(name)(old, logprobs, wide, MASK, mode, cfg)[0]

        return loss

    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}
    for name, other in (("clip", "vanilla"), ("cispo", "cispo")):
        cfg = AlgorithmConfig(policy_loss=name, **clip)
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
            yield f"{name} {mode}", bound(cfg, mode), theirs(other, mode, **clip)
    mode = "seq-mean-token-mean"
    cfg = AlgorithmConfig(policy_loss="gspo", clip_ratio_low=0.1, clip_ratio_high=0.1)
    yield "gspo", bound(cfg, mode), theirs("gspo", mode, clip_ratio_low=0.1, clip_ratio_high=0.1)
    cfg = AlgorithmConfig(policy_loss="sapo", sapo=SapoConfig(tau_positive=0.9, tau_negative=1.2))
    yield "sapo", bound(cfg, mode), theirs("sapo", mode, tau_pos=0.9, tau_neg=1.2)
    cfg = AlgorithmConfig(policy_loss="gmpo")
    yield "gmpo", bound(cfg, mode), theirs("geo_mean", mode, clip_ratio_low=0.4, clip_ratio_high=0.4)
    for name, limit in (("dppo_tv", 0.15), ("dppo_kl", 0.05)):
        cfg = AlgorithmConfig(policy_loss=name, dppo=DppoConfig(max_ratio=1.4))
        other = theirs(
            name, "token-mean", clip_ratio=limit, clip_ratio_low=limit, clip_ratio_high=limit, clip_ratio_c=1.4
        )
        yield name, bound(cfg, "token-mean"), other

    wide = {"clip_ratio_low": 1.0, "clip_ratio_high": 1.0}
    between = ClipCovConfig(share=1.0, lower=0.05, upper=1.0)  # all of them, for the choice is random
    chooses = AlgorithmConfig(policy_loss="clip_cov", clip_cov=between, **wide)

    def clip_cov(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        factor = 1.0 - chosen_of(chooses, logprobs.detach(), advantages)
        assert 0 < factor.sum() < len(factor)
        return ours(chooses, "token-mean", logprobs=logprobs, old=old, advantages=advantages, factor=factor)

    settings = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 1.0}
    same = theirs("clip_cov", "token-mean", policy_loss=settings, **wide)
    yield "clip_cov", on_policy(clip_cov), on_policy(same)  # elsewhere verl looks at the policy of the moment

    holds = AlgorithmConfig(policy_loss="kl_cov", kl_cov=KlCovConfig(share=0.1, coeff=0.8))

    def kl_cov(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        chosen = chosen_of(holds, logprobs.detach(), advantages)
        assert chosen.sum() == 4
        return ours(holds, "token-mean", logprobs=logprobs, old=old, advantages=advantages, chosen=chosen)

    yield "kl_cov", kl_cov, theirs("kl_cov", "token-mean", policy_loss={"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.8})

    def reinforce(**correction: Any) -> Loss:
        correct = RolloutCorrectionConfig(use_rollout_logprobs=True, **correction)
        cfg = AlgorithmConfig(policy_loss="reinforce", rollout_correction=correct)

        def loss(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
            inside = MASK.bool()
            factor = rollout_correction(logprobs.detach()[inside], old[inside], IDS, correct).weights
            return ours(cfg, "token-mean", logprobs=logprobs, old=old, advantages=advantages, factor=factor)

        return loss

    for mine, level, threshold in (
        ({"mode": "truncate", "upper": 1.3}, "token", 1.3),
        ({"mode": "truncate", "upper": 1.3, "level": "sequence"}, "sequence", 1.3),
        ({"mode": "icepop"}, "token", "0.5_5.0"),
    ):
        bypass = {"loss_type": "reinforce", "rollout_is": level, "rollout_is_threshold": threshold}
        other = theirs("bypass_mode", "token-mean", policy_loss={"rollout_correction": bypass})
        yield f"reinforce {mine['mode']} {level}", reinforce(**mine), other


def of_trl() -> Iterator[tuple[str, Loss, Loss]]:
    from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    def theirs(trainer: Any, **settings: Any) -> Loss:
        usual = {
            **{"loss_type": "dapo", "importance_sampling_level": "token", "beta": 0.0, "top_entropy_quantile": 1.0},
            **{"epsilon_low": 0.2, "epsilon_high": 0.28, "off_policy_mask_threshold": None, "use_vllm": False},
            **{"aux_loss_enabled": False, "_entropy_bonus_enabled": False, "max_completion_length": COLUMNS},
            **{"current_gradient_accumulation_steps": 1, "model": SimpleNamespace(training=True)},
            "accelerator": SimpleNamespace(
                num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
            ),
            "args": SimpleNamespace(
                delta=1.5, steps_per_generation=1, sapo_temperature_pos=0.9, sapo_temperature_neg=1.2
            ),
            "_metrics": defaultdict(lambda: defaultdict(list)),
            "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
        }

        def loss(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
            values = (logprobs, torch.zeros_like(logprobs), None)
            fake = SimpleNamespace(**usual | settings, _get_per_token_logps_and_entropies=lambda *_, **__: values)
            inputs = {
                **{"prompt_ids": torch.zeros(ROWS, 1), "prompt_mask": torch.ones(ROWS, 1)},
                **{"completion_ids": MASK, "completion_mask": MASK, "num_items_in_batch": MASK.sum()},
                **{"advantages": advantages, "old_per_token_logps": old},
            }
            return trainer._compute_loss(fake, None, inputs)

        return loss

    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}
    by_type = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
    for kind, mode in by_type.items():
        yield f"clip {kind}", bound(AlgorithmConfig(**clip), mode), theirs(GRPOTrainer, loss_type=kind)
    cfg = AlgorithmConfig(policy_loss="cispo", clip_ratio_low=1.0, clip_ratio_high=0.28)
    yield "cispo", bound(cfg, "token-mean"), theirs(GRPOTrainer, loss_type="cispo", epsilon_high=1.28)
    mode = "seq-mean-token-mean"
    cfg = AlgorithmConfig(policy_loss="gspo", clip_ratio_low=0.1, clip_ratio_high=0.1)
    level = {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1}
    without = SimpleNamespace(delta=None)
    yield "gspo", bound(cfg, mode), theirs(GRPOTrainer, loss_type="grpo", args=without, **level)
    sapo = AlgorithmConfig(policy_loss="sapo", sapo=SapoConfig(tau_positive=0.9, tau_negative=1.2))
    yield "sapo", bound(sapo, mode), theirs(GRPOTrainer, loss_type="sapo")
    cfg = AlgorithmConfig(policy_loss="gmpo")
    yield "gmpo", bound(cfg, mode), theirs(GMPOTrainer, epsilon_low=0.4, epsilon_high=0.4)

    def masked(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        inside = MASK.bool()
        factor = off_policy_mask(logprobs[inside], old[inside], advantages[IDS], IDS, 0.05)
        return ours(sapo, mode, logprobs=logprobs, old=old, advantages=advantages, factor=factor)

    yield "sapo off_policy_mask", masked, theirs(GRPOTrainer, loss_type="sapo", off_policy_mask_threshold=0.05)


def of_polgrad() -> Iterator[tuple[str, Loss, Loss]]:
    """polgrad brings random responses of its own."""
    from polgrad import ALGORITHMS
    from polgrad.testing import assert_conforms

    modes = {
        "token_mean": "token-mean",
        "seq_mean_token_mean": "seq-mean-token-mean",
        "seq_mean_token_sum": "seq-mean-token-sum",
        "token_sum_norm": "seq-mean-token-sum-norm",
    }
    no_dual = 1e9
    for name in ("ppo", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "cispo", "rloo", "reinforce_pp"):
        spec = ALGORITHMS[name].loss
        if name == "dr_grpo":
            spec = replace(spec, norm_len=COLUMNS)
        kind = {"pg_clip": "gspo" if "gspo" in name else "clip"}.get(spec.surrogate.value, spec.surrogate.value)
        low, high = (spec.clip.eps_low or 1.0, spec.clip.eps_high) if spec.clip else (0.2, 0.28)
        cfg = AlgorithmConfig(policy_loss=kind, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=no_dual)

        def conforms(mode: str = modes[spec.aggregation.value], cfg: AlgorithmConfig = cfg, spec: Any = spec) -> Any:
            """Returns polgrad's report; the test has bounds of its own."""

            def loss(*, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
                return ours(
                    cfg, mode, logprobs=logprobs, old=old_logprobs, advantages=advantages, mask=response_mask.double()
                )

            shapes = ((4, COLUMNS), (6, COLUMNS))
            return assert_conforms(loss, spec, n_cases=32, shapes=shapes, loss_rtol=1.0, grad_rtol=10.0)

        yield name, conforms, conforms


def bound(cfg: AlgorithmConfig, mode: str) -> Loss:
    def loss(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        return ours(cfg, mode, logprobs=logprobs, old=old, advantages=advantages)

    return loss


def on_policy(loss: Loss) -> Loss:
    return lambda logprobs, old, advantages: loss(logprobs, logprobs.detach(), advantages)


def difference(left: Loss, right: Loss, seeds: range = range(8)) -> tuple[float, float]:
    """The largest relative difference of loss and gradient."""
    found = []
    for seed in seeds:
        both = []
        for loss in (left, right):
            given = responses(seed)
            leaf = given.pop("logprobs").requires_grad_()
            value = loss(logprobs=leaf, **given)
            value.backward()
            assert leaf.grad is not None
            both.append((value.detach(), leaf.grad * MASK))
        (value, gradient), (other, wanted) = both
        assert wanted.any()
        found.append(((value - other).abs() / other.abs(), (gradient - wanted).norm() / wanted.norm()))
    return tuple(max(float(one[part]) for one in found) for part in (0, 1))  # type: ignore[return-value]


def main() -> None:
    torch.set_default_dtype(torch.float64)  # of the weights of tokens
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        found: dict[str, Any] = {}
        for peer, cases in (("verl", of_verl), ("trl", of_trl), ("polgrad", of_polgrad)):
            try:
                for name, left, right in cases():
                    if peer == "polgrad":
                        report = left()
                        found[f"{peer} {name}"] = (report.max_loss_rel_diff, report.max_grad_rel_diff)
                    else:
                        found[f"{peer} {name}"] = difference(left, right)
            except ImportError as error:
                found[peer] = f"cannot be imported: {error}"
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
