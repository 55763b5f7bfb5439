"""Checks the weight sync end to end: do actors and engines agree on the tokens of a batch?

The check uses the mismatch totals per staleness, taken before the first optimizer step. Its error stops the run and
names the suspect: the weight sync, the compute dtypes, or staleness.
"""

from dapo.config.schema import Config
from workers.training.totals import Mismatch, Totals
from workers.training.unanimous import Unanimous

# Engine arguments of vLLM that can make it compute in other dtypes than the actors.
_TYPE_ARGS = ("dtype", "quantization", "kv_cache_dtype")


class WeightParityError(Unanimous):
    """The engines sampled from other probabilities than the actors compute; nothing was trained on the batch."""


def check_parity(totals: Totals, cfg: Config) -> None:
    """Checks tokens of the current policy against one bound, tokens of older policies against another. Tokens with a
    log-probability that is not finite, on either side, are left out: their optimizer steps are skipped. Raises
    WeightParityError if the mean of |log-probability of the actors - of the engines| is above its bound."""
    fresh, older = totals.mismatch[0], totals.mismatch[1:]
    bound = cfg.weight_sync.max_mean_logprob_diff
    if not fresh.mean <= bound:
        raise WeightParityError(_message(fresh, "weight_sync.max_mean_logprob_diff", bound, _fresh_suspect(cfg)))
    bound = cfg.algorithm.rollout_correction.max_mean_stale_logprob_diff
    for staleness, mismatch in enumerate(older, start=1):
        if not mismatch.mean <= bound:
            suspect = (
                f"staleness: these tokens come from policies at least {staleness} updates old, while tokens of the "
                f"current policy agree (mean {fresh.mean:.4g} over {fresh.tokens:.0f}); sample from newer weights, "
                "lower `actor.optim.lr`, or raise the bound and correct (`algorithm.rollout_correction.mode`)"
            )
            key = "algorithm.rollout_correction.max_mean_stale_logprob_diff"
            raise WeightParityError(_message(mismatch, key, bound, suspect))


def _message(mismatch: Mismatch, key: str, bound: float, suspect: str) -> str:
    return (
        f"the mean of |log-probability of the actors - of the engines| is {mismatch.mean:.4g} over "
        f"{mismatch.tokens:.0f} tokens (largest {mismatch.max_difference:.4g}), above `{key}` ({bound:g}); nothing was "
        f"trained on this batch. Suspect {suspect}"
    )


def _fresh_suspect(cfg: Config) -> str:
    differing = {name: cfg.rollout.vllm[name] for name in _TYPE_ARGS if name in cfg.rollout.vllm}
    differing = {name: value for name, value in differing.items() if value not in (cfg.model.dtype, "auto", None)}
    if differing:
        given = ", ".join(f"`rollout.vllm.{name}` ({value})" for name, value in differing.items())
        return f"the compute types: {given} against `model.dtype` ({cfg.model.dtype}); then the weight sync"
    if cfg.model.dtype == "float32":
        return "the weight sync (engines on old weights): both sides compute in float32"
    return (
        f"the weight sync (engines on old weights); if the bound is passed by little, the rounding of "
        f"`model.dtype` ({cfg.model.dtype}), which the bound must leave room for"
    )
