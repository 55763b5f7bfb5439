"""Learning rates: warm-up from 1/N, a last step that still trains, units, no state, errors for wrong arguments."""

import math
import random

import pytest

from dapo.algorithm.schedule import learning_rates
from dapo.config.actor import LR_SCHEDULER_UNITS, LR_SCHEDULERS
from dapo.config.derived import optimizer_steps
from dapo.config.schema import Config

LR = 1e-3
WARM = [0.25, 0.5, 0.75]
NEEDED = {"cosine_with_min_lr": {"min_lr_rate": 0.1}, "warmup_stable_decay": {"num_decay_steps": 4}}


def config(name: str, *, warmup: int = 4, steps: int = 12, unit: str = "rollout_step", batch: int = 8, **kwargs):
    cfg = Config()
    cfg.data.train_batch_size, cfg.actor.ppo_mini_batch_size, cfg.actor.ppo_epochs = batch, 4, 3
    cfg.trainer.total_steps = steps
    optim = cfg.actor.optim
    optim.lr, optim.lr_scheduler, optim.lr_scheduler_unit, optim.lr_warmup_steps = LR, name, unit, warmup
    optim.lr_scheduler_kwargs = NEEDED.get(name, {}) | kwargs
    return cfg


def rates(cfg: Config) -> list[float]:
    """Returns the rate of every optimizer step of the run, in order."""
    rate = learning_rates(cfg)
    return [rate(version, k) for version in range(cfg.trainer.total_steps) for k in range(optimizer_steps(cfg))]


@pytest.mark.parametrize("name", LR_SCHEDULERS)
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_every_schedule_trains_from_the_first_step_to_the_last(name, warmup):
    """12 rollout steps of 6 optimizer steps each."""
    values = rates(config(name, warmup=warmup))
    assert len(values) == 72
    assert all(0 < value <= LR for value in values)
    starts_below = warmup > 1 and name != "constant"
    assert values[0] == pytest.approx(LR / warmup if starts_below else LR)
    assert all(len(set(values[start : start + 6])) == 1 for start in range(0, 72, 6))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("constant", [1.0] * 8, id="constant"),
        pytest.param("constant_with_warmup", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0], id="constant_with_warmup"),
        pytest.param("linear", [0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2], id="linear"),
        pytest.param("cosine", WARM + [(1 + math.cos(math.pi * k / 5)) / 2 for k in range(5)], id="cosine"),
        pytest.param("inverse_sqrt", WARM + [(4 / k) ** 0.5 for k in range(4, 9)], id="inverse_sqrt"),
    ],
)
def test_by_hand(name, expected):
    """8 steps, warm-up of 4; inverse_sqrt with its default timescale, the warm-up."""
    assert rates(config(name, steps=8))[::6] == pytest.approx([LR * factor for factor in expected])


@pytest.mark.parametrize("name", ["linear", "cosine", "warmup_stable_decay"])
def test_counting_optimizer_steps_is_a_longer_run_of_single_ones(name):
    """8 / 4 mini-batches x 3 epochs = 6 optimizer steps per rollout step; the warm-up then counts them too."""
    cfg = config(name, steps=5, warmup=7, unit="optimizer_step")
    single = config(name, steps=30, warmup=7)
    assert optimizer_steps(cfg) == 6
    values = rates(cfg)
    assert values == rates(single)[::6]
    assert values[:8] == pytest.approx([LR * min(1.0, k / 7) for k in range(1, 8)] + [values[7]])
    assert len(set(values[7:])) > 1


@pytest.mark.parametrize("unit", ["rollout_step", "optimizer_step"])
def test_a_resumed_run_has_the_same_rates(unit):
    """Asked in any order, by functions made anew."""
    cfg = config("cosine", unit=unit)
    asked = [(version, k) for version in range(12) for k in range(6)]
    expected = dict(zip(asked, rates(cfg), strict=True))
    random.Random(0).shuffle(asked)
    assert all(learning_rates(cfg)(version, k) == expected[version, k] for version, k in asked)


def test_the_arguments_reach_the_schedule():
    values = rates(config("cosine_with_min_lr", warmup=1, steps=400, min_lr_rate=0.5))
    assert values[-1] == pytest.approx(LR / 2, rel=1e-4) and min(values) >= LR / 2
    decay = [(1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)]
    values = rates(config("warmup_stable_decay", num_decay_steps=6))[::6]
    assert values == pytest.approx([LR * factor for factor in [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, *decay]])


@pytest.mark.parametrize(
    ("name", "kwargs", "cause"),
    [
        pytest.param("linear", {"num_cycels": 2}, "num_cycels", id="unknown"),
        pytest.param("cosine", {"min_lr": 1e-7}, "min_lr", id="of-another-schedule"),
        pytest.param("polynomial", {"lr_end": 1.0}, "smaller than", id="bad-value"),
        pytest.param("constant", {"min_lr": 1e-7}, "min_lr", id="constant-takes-none"),
        pytest.param("warmup_stable_decay", {"num_decay_steps": None}, "", id="missing"),
    ],
)
def test_wrong_arguments_are_named(name, kwargs, cause):
    with pytest.raises(ValueError) as error:
        learning_rates(config(name, **kwargs))
    message = str(error.value)
    assert all(part in message for part in ("`actor.optim.lr_scheduler_kwargs`", f"({name})", cause))


@pytest.mark.parametrize("unit", LR_SCHEDULER_UNITS)
@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize(
    ("name", "kwargs", "cause"),
    [
        pytest.param("cosine", {"num_cycles": "half"}, "'half'", id="a word"),
        pytest.param("polynomial", {"power": "2"}, "'str'", id="a number in quotes"),
        pytest.param("inverse_sqrt", {"timescale": 0}, "division by zero", id="timescale 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:Both num_training_steps")
def test_arguments_that_only_a_later_step_uses_are_named_before_the_run(name, kwargs, cause, warmup, unit):
    with pytest.raises(ValueError) as error:
        learning_rates(config(name, warmup=warmup, steps=100, unit=unit, **kwargs))
    message = str(error.value)
    assert all(part in message for part in ("`actor.optim.lr_scheduler_kwargs` ({", f"({name})", cause, "; give "))
