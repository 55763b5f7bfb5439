"""Fields of the configuration: every key says what it means, and every value is judged by its own field."""

import dataclasses
import math
from typing import Any

import pytest
from omegaconf import OmegaConf

from dapo.config.fields import About, at_least, key, keys, one_of, positive, problems, section, share
from dapo.config.reward import RewardFunctionConfig
from dapo.config.schema import Config


@dataclasses.dataclass(slots=True)
class Item:
    weight: float = key(1.0, "weight", values="a finite number", holds=math.isfinite)


@dataclasses.dataclass(slots=True)
class Inner:
    share: float = share(0.5, "a part", "; half is usual")
    size: int = at_least(0, 3, "a size")
    name: str = one_of(("a", "b"), "a", "a name", verl="outer.name, other.name")


@dataclasses.dataclass(slots=True)
class Outer:
    lr: float = positive(1e-3, "a rate")
    count: int = at_least(2, 4, "a count", ": two make a pair")
    free: str = key("x", "anything")
    items: list[Item] = key([Item(), Item()], "weights")
    inner: Inner = section(Inner)


def test_defaults_are_the_values_and_are_not_shared() -> None:
    one, other = Outer(), Outer()
    assert (one.lr, one.count, one.free, one.inner) == (1e-3, 4, "x", Inner(share=0.5, size=3, name="a"))
    one.items[0].weight = 5.0
    assert other.items == Outer().items == [Item(1.0), Item(1.0)]


def test_every_key_is_listed_with_what_was_said_of_it() -> None:
    listed = {one.name: one for one in keys(Outer)}
    names = ["lr", "count", "free", "items", "items[].weight", "inner.share", "inner.size", "inner.name"]
    assert list(listed) == names
    assert listed["lr"].default == 1e-3 and listed["lr"].kind is float
    assert listed["count"].about.values == "at least 2: two make a pair"
    about = listed["inner.name"].about
    assert (about.text, about.values, about.verl, about.trl) == ("a name", "one of a, b", "outer.name, other.name", "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": 0.0}, "`lr` (0.0) must be greater than 0"),
        ({"lr": math.inf}, "`lr` (inf) must be greater than 0"),
        ({"lr": math.nan}, "`lr` (nan) must be greater than 0"),
        ({"count": 1}, "`count` (1) must be at least 2: two make a pair"),
        ({"items": [Item(), Item(math.nan)]}, "`items[1].weight` (nan) must be a finite number"),
        ({"inner": Inner(share=0.0)}, "`inner.share` (0.0) must be above 0 and at most 1; half is usual"),
        ({"inner": Inner(share=1.5)}, "`inner.share` (1.5) must be above 0 and at most 1"),
        ({"inner": Inner(size=-1)}, "`inner.size` (-1) must be 0 or more"),
        ({"inner": Inner(name="c")}, "`inner.name` (c) must be one of a, b"),
    ],
    ids=["zero", "infinite", "nan", "at least", "item", "share of 0", "share", "negative", "choice"],
)
def test_a_value_that_is_not_allowed_is_one_line(change: dict[str, Any], said: str) -> None:
    given = dataclasses.replace(Outer(), **change)
    hydras: Any = OmegaConf.to_object(OmegaConf.structured(given))  # instances of the same dataclasses
    for cfg in (given, hydras):
        [problem] = problems(cfg)
        assert problem.startswith(said)


def test_bounds_are_allowed_and_all_problems_come_at_once_in_the_order_of_the_fields() -> None:
    assert list(problems(Outer(count=2, inner=Inner(share=1, size=0)))) == []
    found = list(problems(Outer(lr=-1, count=0, inner=Inner(name="z"))))
    assert [line.split("`")[1] for line in found] == ["lr", "count", "inner.name"]


def test_every_key_of_a_run_says_what_it_means_and_has_an_allowed_default() -> None:
    listed = list(keys(Config))
    assert len(listed) > 120 and len({one.name for one in listed}) == len(listed)
    for one in listed:
        assert isinstance(one.about, About) and len(one.about.text) > 5, one.name
    assert list(problems(Config())) == list(problems(RewardFunctionConfig())) == []
