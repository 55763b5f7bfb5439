"""What a rank keeps of its own work's errors, without other ranks: what they tell is the test's."""

import pytest
import torch

from workers.training import unanimous as module
from workers.training.unanimous import FilesError, OwnWork


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
        raise PermissionError("no")
    assert own.failed
    with own:
        raise ValueError("what follows from it")
    with pytest.raises(FilesError, match="^saving: actor rank 0: OSError: full; actor rank 1, 2: PermissionError: no$"):
        own.meet("saving")
    assert told == ["PermissionError: no"]


def test_a_rank_that_has_not_failed_raises_too(told: list[str]) -> None:
    own = OwnWork()
    with own:
        pass
    assert not own.failed
    with pytest.raises(FilesError, match="^saving: actor rank 0: OSError: full$"):
        own.meet("saving")
    assert told == [""]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_what_would_fail_again_is_not_kept(error: BaseException) -> None:
    own = OwnWork()
    with pytest.raises(type(error)), own:
        raise error
    assert not own.failed
