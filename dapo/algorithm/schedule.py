"""Computes the learning rate of every optimizer step, from transformers' schedules. The rate is a stateless function of
version and optimizer step, so a resumed run has the same rates. Warm-up of N steps starts at 1/N, so the first update
changes the weights."""

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from dapo.config.actor import OptimConfig
from dapo.config.derived import optimizer_steps
from dapo.config.schema import Config

WITHOUT_ARGUMENTS = ("constant", "constant_with_warmup")  # get_scheduler would ignore them silently
TIMESCALE = 10_000  # steps; transformers' default for inverse_sqrt without warm-up


def learning_rates(cfg: Config) -> Callable[[int, int], float]:
    """Returns rate(version, k): of optimizer step k (from 0) of the update that starts from policy `version`.
    transformers' factor is 0 in step 0 and after the last step. It is read one step later, with the run one step
    longer, so that neither the first step nor the last is lost. Raises ValueError when transformers
    rejects `actor.optim.lr_scheduler_kwargs`."""
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
        assert isinstance(scheduler, LambdaLR)
        (factor,) = scheduler.lr_lambdas
        factor(cfg.trainer.total_steps * per_update)  # many arguments are used only at late steps
    except (TypeError, ValueError, ArithmeticError) as error:
        raise _refused(optim, f"{error}; give those of transformers' get_scheduler, as numbers") from error

    def rate(version: int, k: int) -> float:
        step = version if per_update == 1 else version * per_update + k
        return optim.lr * factor(step + 1)

    return rate


def _refused(optim: OptimConfig, why: str) -> ValueError:
    return ValueError(
        f"`actor.optim.lr_scheduler_kwargs` ({optim.lr_scheduler_kwargs}) do not fit `actor.optim.lr_scheduler` "
        f"({optim.lr_scheduler}): {why}"
    )
