"""What ranks refuse, and raise alike, without other ranks: what they tell is the test's."""

import pytest
import torch

from dapo.workers.training import collective_errors as module
from dapo.workers.training.collective_errors import FilesError, OwnWork, RankVersion, Refused, Unanimous


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this rank, the second of three, tells the others; the third has failed as it has."""
    mine: list[str] = []

    def all_gather_object(errors: list[str], error: str, group: None) -> None:
        mine.append(error)
        errors[:] = ["OSError: full", error, error]

    monkeypatch.setattr(module.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(module.dist, "all_gather_object", all_gather_object)
    return mine


def test_all_ranks_raise_what_some_have_met(told: list[str]) -> None:
    own = OwnWork()
    with own:
        pass
    assert not own.failed
    with pytest.raises(FilesError, match="^saving: actor rank 0: OSError: full$"):
        own.meet("saving")
    with own:
        raise PermissionError("no")
    assert own.failed
    with own:
        raise ValueError("what follows from it")
    with pytest.raises(FilesError, match="^saving: actor rank 0: OSError: full; actor rank 1, 2: PermissionError: no$"):
        own.meet("saving")
    assert told == ["", "PermissionError: no"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_what_would_fail_again_is_not_kept(error: BaseException) -> None:
    own = OwnWork()
    with pytest.raises(type(error)), own:
        raise error
    assert not own.failed


def test_a_change_that_ends_makes_the_next_version():
    standing = RankVersion()
    standing.check("an update", 0)
    with standing.changing("the update", to=1, or_nothing=True):
        with pytest.raises(Refused, match="refuse a checkpoint: the update did not come to its end"):
            standing.check("a checkpoint", 0)
    standing.check("a checkpoint", 1)
    standing.check("an export")
    with pytest.raises(Refused, match=r"an update of policy version 0: they are at version 1; load the checkpoint"):
        standing.check("an update", 0)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_after_any_other_error_the_weights_are_of_no_version_until_some_are_loaded(error):
    standing = RankVersion()
    with pytest.raises(type(error)), standing.changing("the update", to=1, or_nothing=True):
        raise error
    for version in (None, 0, 1):
        with pytest.raises(Refused, match="of no policy version; load a checkpoint"):
            standing.check("a checkpoint", version)
    with standing.changing("loading x", to=5, or_nothing=False):
        pass
    standing.check("a checkpoint", 5)


def test_a_change_that_all_ranks_refuse_leaves_the_version_but_half_a_load_is_none():
    standing = RankVersion()
    with pytest.raises(Unanimous), standing.changing("the update", to=1, or_nothing=True):
        raise Unanimous("other weights")
    standing.check("a checkpoint", 0)
    with pytest.raises(Unanimous), standing.changing("loading x", to=3, or_nothing=False):
        raise Unanimous("cut off")
    with pytest.raises(Refused, match="loading x did not come to its end"):
        standing.check("a weight sync")
