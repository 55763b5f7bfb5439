"""How many draws to start: the least that has the promised quantile, the most that has, and what neither may do."""

import math
import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.sampling.demand import Forecast, UsableRate


def rate_of(share: float, draws: float, *, certain: bool = False) -> UsableRate:
    rate = UsableRate(certain=certain)
    rate.restore([share * draws, draws])
    return rate


class Supply(NamedTuple):
    usable: int = 0
    in_flight: int = 0


def to_start(rate: UsableRate, wanted: int, at: Supply) -> int:
    return rate.missing(wanted, usable=at.usable, in_flight=at.in_flight)


def allowed(rate: UsableRate, limit: int, at: Supply) -> int:
    """Batches of a size that leaves no surplus, and nothing is heard yet of the draws in flight."""
    p = rate.value
    return rate.allowed(limit, 0, Forecast(mean=at.usable + at.in_flight * p, variance=at.in_flight * p * (1 - p)))


def at_least(successes: int, draws: int, p: float) -> float:
    """P(Binomial(draws, p) >= successes), summed exactly."""
    if successes <= 0 or p >= 1.0:
        return float(successes <= draws)
    logs = (
        math.lgamma(draws + 1) - math.lgamma(k + 1) - math.lgamma(draws - k + 1) + k * math.log(p)
        + (draws - k) * math.log1p(-p)
        for k in range(successes, draws + 1)
    )  # fmt: skip
    return math.fsum(map(math.exp, logs))


def covers(rate: UsableRate, wanted: int, at: Supply, more: int, *, slack: float) -> bool:
    """The promise of `missing`, one standard deviation below the mean; the doubt of the rate is kept finite."""
    p = rate.value
    _, draws = rate.state()
    variance = p * (1 - p) * (at.in_flight + more) + min(p * (1 - p) / draws, 0.95 * p * p) * (at.in_flight + more) ** 2
    return at.usable + (at.in_flight + more) * p - math.sqrt(variance) >= wanted + slack


RATES = st.builds(rate_of, st.one_of(st.floats(0.01, 0.999), st.just(1.0)), st.floats(1.0, 5000.0))
COUNTS = st.integers(0, 600)
SHORT = st.one_of(st.integers(-3, 3), st.integers(-200, 600))  # usable groups that are not known yet


@given(rate=RATES, wanted=st.integers(1, 600), short=SHORT, running=COUNTS)
def test_missing_is_the_least_number_that_covers_the_need(rate, wanted, short, running):
    known = max(0, wanted - short)
    at = Supply(known, running)
    more = to_start(rate, wanted, at)
    if known >= wanted:
        assert more == 0, "the batch is there: no draw can be needed"
        return
    assert more >= 0 and covers(rate, wanted, at, more, slack=-1e-6)
    tried = {more - 1, more // 2, more * 9 // 10, 0} - {more, -1}
    assert not any(covers(rate, wanted, at, fewer, slack=1e-6) for fewer in tried), more


@given(
    rate=RATES,
    batches=st.integers(1, 3),
    batch=st.integers(1, 600),
    known=COUNTS,
    mean=st.floats(0, 600),
    variance=st.floats(0, 150),
)
def test_allowed_is_the_most_that_the_bound_lets(rate, batches, batch, known, mean, variance):
    """Two standard deviations above the mean, a hundredth of a batch may be too many, and not one draw more."""
    there = Forecast(mean=known + mean, variance=variance)
    limit, p = batches * batch, rate.value
    more = rate.allowed(limit, batch, there)
    if p >= 1.0:
        assert more == max(0, int(limit - there.mean))
        return

    def too_many(count: int) -> float:
        deviation = math.sqrt(variance + count * p * (1 - p))
        return there.mean + count * p + 2 * deviation - limit - batch / 100

    assert more == 0 or too_many(more) <= 1e-6
    assert too_many(more + 1) > -1e-6


@pytest.mark.parametrize("share", [0.05, 0.28, 0.5, 0.9, 0.98])
@pytest.mark.parametrize("wanted", [16, 128, 512])
@pytest.mark.parametrize("running", [0, 40])
def test_against_the_exact_binomial(share, wanted, running):
    """A rate that is known gives 84 % for what is missing, 2 % of too many for what is allowed, about as a normal."""
    rate = rate_of(share, 1e9)
    enough = running + to_start(rate, wanted, Supply(in_flight=running))
    assert 0.80 <= at_least(wanted, enough, share) <= 0.97 or enough == running
    assert at_least(wanted, enough - 2, share) < 0.95 or enough == running
    most = running + allowed(rate, wanted, Supply(in_flight=running))
    if most > running:
        assert at_least(wanted + 1, most, share) <= 0.033
        deviation = math.sqrt(most * share * (1 - share))
        assert most * share >= wanted - 2 * deviation - 2, "as many as the bound lets"


def test_a_rate_that_is_in_doubt_asks_for_more():
    """Monte-Carlo: the true rate is drawn from what 60 draws tell of it. Without the doubt, half as safe."""
    rng = random.Random(0)
    rate = rate_of(0.5, 60.0)
    more = to_start(rate, 128, Supply())
    enough = 0
    for _ in range(1500):
        true = rng.betavariate(30, 30)
        enough += sum(rng.random() < true for _ in range(more)) >= 128
    assert 0.79 <= enough / 1500 <= 0.92
    assert more > to_start(rate_of(0.5, 1e9), 128, Supply()) + 20


@pytest.mark.parametrize(
    ("rate", "wanted", "at", "missing", "ahead"),
    [
        pytest.param(rate_of(1.0, 50.0), 8, Supply(), 8, 8, id="every draw usable"),
        pytest.param(rate_of(1.0, 50.0), 8, Supply(3, 2), 3, 3, id="every draw usable, some there"),
        pytest.param(rate_of(1.0, 50.0), 8, Supply(9, 0), 0, 0, id="more known than wanted"),
        pytest.param(rate_of(0.5, 50.0), 8, Supply(9, 0), 0, 0, id="more known than wanted, half usable"),
        pytest.param(rate_of(0.5, 50.0), 8, Supply(8, 0), 0, 0, id="all known"),
        pytest.param(rate_of(0.01, 1e3), 8, Supply(8, 1), 0, 0, id="all known, rare, one runs"),
        pytest.param(rate_of(0.5, 50.0), 8, Supply(0, 1000), 0, 0, id="more than enough run"),
        pytest.param(UsableRate(certain=True), 8, Supply(2, 3), 3, 3, id="no filter"),
    ],
)
def test_edges(rate, wanted, at, missing, ahead):
    assert (to_start(rate, wanted, at), allowed(rate, wanted, at)) == (missing, ahead)
    assert rate.allowed(0, 512, Forecast(mean=0, variance=0)) == 0, "no update follows"


@pytest.mark.parametrize("share", [1e-6, 1e-3, 0.5, 1 - 1e-9, 1 - 1e-15])
@pytest.mark.parametrize("draws", [1.0, 1e9])
@pytest.mark.parametrize("wanted", [1, 10**6])
def test_extreme_rates_give_whole_finite_numbers_of_the_right_size(share, draws, wanted):
    rate = rate_of(share, draws)
    missing, ahead = to_start(rate, wanted, Supply()), allowed(rate, wanted, Supply())
    assert type(missing) is int and type(ahead) is int
    assert wanted <= missing <= 60 * (wanted / share) + 60 / share
    assert 0 <= ahead <= wanted / share
    assert to_start(rate, wanted, Supply(0, 10**14)) == 0 and allowed(rate, wanted, Supply(0, 10**13)) == 0


def test_a_rate_that_rises_is_followed_like_one_that_falls():
    """The first steps of a policy that learns quickly: a step counts half, however many draws those before it took."""
    rate = UsableRate(certain=False)
    rate.end_step(usable=8, draws=142)
    first = rate.value
    rate.end_step(usable=8, draws=22)
    assert rate.value == pytest.approx((first + 8 / 22) / 2)
    rate.end_step(usable=8, draws=142)
    assert rate.value < 1.2 * 8 / 142 + 0.01


def test_the_rate_learns_within_a_step_and_remembers_what_the_step_used_up():
    rate = UsableRate(certain=False)
    for usable in [True, False, False, False]:
        rate.observe(usable)
    assert rate.value == pytest.approx(1.5 / 5)
    rate.end_step(usable=2, draws=10)  # timing had shown others
    assert rate.value == pytest.approx(2.5 / 11)
    rate.end_step(usable=9, draws=10)
    assert rate.value == pytest.approx((2.5 / 2 + 9) / (11 / 2 + 10))
    again = UsableRate(certain=False)
    rate.observe(True)  # is not part of the state: another run may have seen others by then
    again.restore(rate.state())
    assert again.value == pytest.approx((2.5 / 2 + 9) / (11 / 2 + 10))
