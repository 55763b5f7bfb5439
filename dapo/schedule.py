"""Computes the learning rate of every optimizer step, from transformers' schedules. The rate is a stateless function of
version and optimizer step, so a resumed run has the same rates. Warm-up of N steps starts at 1/N, so the first update
changes the weights."""

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from dapo.config.actor import OptimConfig
from dapo.config.schema import Config
from dapo.derived import optimizer_steps

WITHOUT_ARGUMENTS = ("constant", "constant_with_warmup")  # get_scheduler would ignore them silently
TIMESCALE = 10_000  # steps; transformers' default for inverse_sqrt without warm-up
ROUNDING = 1e-9  # relative tolerance on the highest rate


def learning_rates(cfg: Config) -> Callable[[int, int], float]:
    """Returns rate(version, k): of optimizer step k (from 0) of the update that starts from policy `version`.
    transformers' factor is 0 in step 0 and after the last step. It is read one step later, with the run one step
    longer, so that neither the first step nor the last is lost. Raises ValueError when `get_scheduler` rejects
    `actor.optim.lr_scheduler_kwargs`."""
    from transformers import get_scheduler

    optim = cfg.actor.optim
    per_update = optimizer_steps(cfg) if optim.lr_scheduler_unit == "optimizer_step" else 1
    optimizer = torch.optim.SGD([torch.zeros(())], lr=optim.lr)
    if optim.lr_scheduler_kwargs and optim.lr_scheduler in WITHOUT_ARGUMENTS:
        raise _refused(optim, "it takes none; leave them out or choose another scheduler")
    arguments = dict(optim.lr_scheduler_kwargs)
    if optim.lr_scheduler == "inverse_sqrt" and not optim.lr_warmup_steps and arguments.get("timescale") is None:
        arguments["timescale"] = TIMESCALE  # else derived from the warm-up of 1 passed below
    try:
        scheduler = get_scheduler(
            optim.lr_scheduler,
            optimizer,
            num_warmup_steps=max(1, optim.lr_warmup_steps),
            num_training_steps=cfg.trainer.total_steps * per_update + 1,
            scheduler_specific_kwargs=arguments,
        )
    except (TypeError, ValueError, ArithmeticError) as error:
        raise _refused(optim, f"{error}; give those of transformers' get_scheduler") from error
    assert isinstance(scheduler, LambdaLR)
    (factor,) = scheduler.lr_lambdas

    def rate(version: int, k: int) -> float:
        step = version if per_update == 1 else version * per_update + k
        return optim.lr * factor(step + 1)

    return rate


def check_rates(cfg: Config) -> None:
    """Computes the rate of the first and last optimizer step of every update, because many arguments are used only
    then. Raises ValueError as `learning_rates` does, and if a rate cannot be computed, is outside 0 to
    `actor.optim.lr`, or is 0 throughout two updates in a row, which train nothing. (A cosine is 0 for at most one
    update.)"""
    rate, optim, last = learning_rates(cfg), cfg.actor.optim, optimizer_steps(cfg) - 1
    idle = False
    for version in range(cfg.trainer.total_steps):
        where = f"in step {version + 1} of `trainer.total_steps` ({cfg.trainer.total_steps})"
        try:
            rates = [float(rate(version, k)) for k in (0, last)]
        except (TypeError, ValueError, ArithmeticError) as error:
            raise _refused(optim, f"the rate {where} cannot be computed ({error}); give numbers") from error
        for value in rates:
            if not 0 <= value <= optim.lr * (1 + ROUNDING):  # nor NaN
                between = f"between 0 and `actor.optim.lr` ({optim.lr:g})"
                raise _refused(optim, f"the rate is {value:g} {where}; give some that keep it {between}")
        if idle and not any(rates):
            raise _refused(optim, f"the rate is 0 {where} and in the one before it; give some that keep it above 0")
        idle = not any(rates)


def _refused(optim: OptimConfig, why: str) -> ValueError:
    return ValueError(
        f"`actor.optim.lr_scheduler_kwargs` ({optim.lr_scheduler_kwargs}) do not fit `actor.optim.lr_scheduler` "
        f"({optim.lr_scheduler}): {why}"
    )
