"""Tables what a curriculum saves: prompts with pass rates in, generated tokens at the same number of mixed groups out.

The order of the draws, the history and the rules are a real run's (`dapo.data`); what the policy makes of a prompt is
assumed: pass rates are Beta distributed at first, and the logit of each rises by the same amount per step, whatever is
trained on. A step takes its draws up to the last group needed, as a run at staleness 0 trains on them; time and surplus
are left out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dapo.config.sampling import CURRICULA, DataConfig
from dapo.data.curriculum import curriculum_of
from dapo.data.order import PromptOrder
from dapo.simulate.books import Scenario, prompt, scored

COLUMNS = (
    *("curriculum", "prompts", "epochs of uniform", "mixed groups", "draws", "of them mixed", "tokens"),
    *("tokens of uniform", "retired at the end", "effective prompts at the end"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Population:
    """Describes prompts and policy. count: prompts. alpha, beta: of the distribution of first pass rates. gain: of
    the logit of each, per step."""

    count: int = 2000
    alpha: float = 0.5
    beta: float = 0.5
    gain: float = 0.03


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Holds what one curriculum came to. tokens: generated. metrics: of the last step's order."""

    draws: int = 0
    mixed: int = 0
    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


def outcome(name: str, scenario: Scenario, population: Population) -> Outcome:
    """Returns what the curriculum of this name comes to in all steps."""
    work, found, ended = scenario.workload, Outcome(), 0
    rng = np.random.default_rng(work.seed)
    skill = _logit(rng.beta(population.alpha, population.beta, population.count))
    order = PromptOrder(
        [prompt(number) for number in range(population.count)],
        seed=work.seed,
        shuffle=True,
        curriculum=curriculum_of(DataConfig(curriculum=name), work.n),
    )
    for version in range(scenario.steps):
        rates = 1.0 / (1.0 + np.exp(-(skill + population.gain * version)))
        groups, mixed = [], 0
        while mixed < scenario.batch:
            draw = order.draw(ended)
            luck = np.random.default_rng((work.seed, version, draw.index))  # as in a run: by draw and policy
            right = luck.random(work.n) < rates[draw.prompt.id]
            lengths = np.minimum(work.cap, np.exp(luck.normal(math.log(work.median), work.sigma, work.n)))
            lengths = np.where(right, lengths, np.minimum(work.cap, lengths * work.wrong_longer))
            groups.append(scored(draw, right))
            mixed += 0 < right.sum() < work.n
            found.tokens += int(lengths.sum())
            ended += 1
        found.mixed += mixed
        order.learn(groups, live=(), settled=ended, version=version + 1)
    found.draws, found.metrics = ended, order.metrics()
    return found


def rows(scenario: Scenario, population: Population) -> Iterator[list[str]]:
    """Yields the cells of one line per curriculum."""
    base = outcome(CURRICULA[0], scenario, population)
    for name in CURRICULA:
        found = base if name == CURRICULA[0] else outcome(name, scenario, population)
        yield [
            name,
            str(population.count),
            f"{base.draws / population.count:.1f}",
            str(found.mixed),
            str(found.draws),
            f"{found.mixed / found.draws:.2f}",
            f"{found.tokens / 1e6:.1f}M",
            f"{found.tokens / base.tokens:.2f}",
            f"{found.metrics.get('curriculum/retired', 0.0):.0%}",
            f"{found.metrics.get('curriculum/effective_prompts', 1.0):.2f}",
        ]


def _logit(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    clipped = np.clip(rates, 1e-6, 1 - 1e-6)
    return np.asarray(np.log(clipped / (1 - clipped)))
