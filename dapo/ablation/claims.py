"""Puts the paper's claims about its techniques as numbers (arXiv 2503.14476, section 3), and says which hold here.

In: curves by rung and seed. Out: a table, a row per claim: the paired difference of one quantity between two rungs,
with its 95 % interval, and the verdict: `held` where the interval lies on the claimed side of 0, `refuted` where it
lies on the other, else `unresolved`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from dapo.ablation.results import Curve, Estimate, estimate
from dapo.report.table import table as markdown_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """States that `quantity` is larger (`sign` 1) or smaller (-1) in `rung` than in `against`."""

    text: str
    rung: str
    against: str
    sign: int = 1
    unit: str = "last accuracy"
    quantity: Callable[[Curve], float] = attrgetter("final")


CLAIMS = (
    Claim(
        text="overlong filtering makes training better (3.4)",
        rung="overlong_filtering",
        against="grpo",
    ),
    Claim(
        text="clip-higher keeps the entropy up (3.1)",
        rung="clip_higher",
        against="overlong_filtering",
        unit="entropy at the end, nats a token",
        quantity=lambda run: run.late("entropy"),
    ),
    Claim(
        text="soft overlong punishment keeps responses below the cap (3.4)",
        rung="soft_overlong",
        against="clip_higher",
        sign=-1,
        unit="truncated responses at the end, share",
        quantity=lambda run: run.late("truncated"),
    ),
    Claim(
        text="the token-level loss lets length grow without excess (3.3)",
        rung="token_mean",
        against="soft_overlong",
        sign=-1,
        unit="length at the end, tokens",
        quantity=lambda run: run.late("length"),
    ),
    Claim(
        text="dynamic sampling keeps the gradient from vanishing (3.2)",
        rung="dynamic_sampling",
        against="token_mean",
        unit="norm of the gradient at the end",
        quantity=lambda run: run.late("grad_norm"),
    ),
    Claim(
        text="dynamic sampling learns more from an optimizer step (3.2)",
        rung="dynamic_sampling",
        against="token_mean",
    ),
    Claim(
        text="all of them together learn more than naive GRPO (4.2)",
        rung="dynamic_sampling",
        against="grpo",
    ),
    Claim(
        text="a filter on accuracy is better than one on the shaped reward",
        rung="dynamic_sampling",
        against="filter_by_reward",
    ),
)


def verdict(difference: Estimate, sign: int) -> str:
    """Returns what the interval says of a claim that the difference has this sign."""
    if not difference.resolved:
        return "unresolved"
    return "held" if difference.mean * sign > 0 else "refuted"


def claims_table(ladder: dict[str, dict[int, Curve]]) -> str:
    """Returns the Markdown table of the claims whose two rungs are there; empty where there is none."""
    rows = []
    for claim in CLAIMS:
        if not {claim.rung, claim.against} <= ladder.keys():
            continue
        with_it, without = ladder[claim.rung], ladder[claim.against]
        found = estimate([claim.quantity(run) - claim.quantity(without[seed]) for seed, run in with_it.items()])
        rows.append([claim.text, claim.unit, found.shown("+.3g"), verdict(found, claim.sign)])
    return markdown_table(("claim", "quantity", "difference", "here"), rows) if rows else ""
