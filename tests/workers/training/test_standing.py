"""A rank refuses what needs weights of another version than its own, or of any where it has none."""

import pytest

from workers.training.standing import Standing
from workers.training.unanimous import Refused, Unanimous


def test_a_change_that_ends_makes_the_next_version():
    standing = Standing()
    standing.check("an update", 0)
    with standing.changing("the update", to=1, or_nothing=True):
        with pytest.raises(Refused, match="refuse a checkpoint: the update did not come to its end"):
            standing.check("a checkpoint", 0)
    standing.check("a checkpoint", 1)
    standing.check("an export")
    with pytest.raises(Refused, match=r"an update of policy version 0: they are at version 1; load the checkpoint"):
        standing.check("an update", 0)


def test_a_change_that_all_ranks_refuse_leaves_the_version():
    standing = Standing()
    with pytest.raises(Unanimous), standing.changing("the update", to=1, or_nothing=True):
        raise Unanimous("other weights")
    standing.check("a checkpoint", 0)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_after_any_other_error_the_weights_are_of_no_version_until_some_are_loaded(error):
    standing = Standing()
    with pytest.raises(type(error)), standing.changing("the update", to=1, or_nothing=True):
        raise error
    for version in (None, 0, 1):
        with pytest.raises(Refused, match="of no policy version; load a checkpoint"):
            standing.check("a checkpoint", version)
    with standing.changing("loading x", to=5, or_nothing=False):
        pass
    standing.check("a checkpoint", 5)


def test_half_a_load_is_no_version_even_where_all_ranks_failed_alike():
    standing = Standing()
    with pytest.raises(Unanimous), standing.changing("loading x", to=3, or_nothing=False):
        raise Unanimous("cut off")
    with pytest.raises(Refused, match="loading x did not come to its end"):
        standing.check("a weight sync")
