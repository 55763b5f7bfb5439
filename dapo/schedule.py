"""Computes the learning rate of every optimizer step, from transformers' schedules.

In: `actor.optim` and the length of the run. Out: a function of the version and the optimizer step within it, which
holds no state: a resumed run has the same rates. Warm-up of N steps starts at 1/N: the first update moves the weights.
"""

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from dapo.config.schema import Config
from dapo.derived import optimizer_steps

WITHOUT_ARGUMENTS = ("constant", "constant_with_warmup")  # get_scheduler would drop them without a word


def learning_rates(cfg: Config) -> Callable[[int, int], float]:
    """Returns rate(version, k): of optimizer step k (from 0) of the update that starts from policy `version`.

    transformers' factor starts at 0 in step 0 and ends at 0 after the last one; it is read one step later, with the
    run one step longer, so that neither the first step nor the last is lost.

    Raises ValueError when `get_scheduler` does not take `actor.optim.lr_scheduler_kwargs`.
    """
    from transformers import get_scheduler

    optim = cfg.actor.optim
    per_update = optimizer_steps(cfg) if optim.lr_scheduler_unit == "optimizer_step" else 1
    optimizer = torch.optim.SGD([torch.zeros(())], lr=optim.lr)
    refused = f"`actor.optim.lr_scheduler_kwargs` ({optim.lr_scheduler_kwargs}) do not fit `actor.optim.lr_scheduler` "
    if optim.lr_scheduler_kwargs and optim.lr_scheduler in WITHOUT_ARGUMENTS:
        raise ValueError(f"{refused}({optim.lr_scheduler}): it takes none; leave them out or choose another scheduler")
    try:
        scheduler = get_scheduler(
            optim.lr_scheduler,
            optimizer,
            num_warmup_steps=max(1, optim.lr_warmup_steps),
            num_training_steps=cfg.trainer.total_steps * per_update + 1,
            scheduler_specific_kwargs=optim.lr_scheduler_kwargs,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{refused}({optim.lr_scheduler}): {error}; give those of transformers' get_scheduler"
        ) from error
    assert isinstance(scheduler, LambdaLR)
    (factor,) = scheduler.lr_lambdas

    def rate(version: int, k: int) -> float:
        step = version if per_update == 1 else version * per_update + k
        return optim.lr * factor(step + 1)

    return rate
