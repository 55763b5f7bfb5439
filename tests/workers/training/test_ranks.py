"""Which failures of ranks leave them usable, without Ray: each rank's answer is a future of the test's."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from dapo.pools import ActorsLost
from dapo.workers.remote import RemoteError
from dapo.workers.training import ranks as module
from dapo.workers.training.collective_errors import FilesError
from dapo.workers.training.ranks import Ranks
from dapo.workers.training.update_metrics import WeightParityError

DEAD = "while waiting for actor rank 1: ActorDiedError: its process died"
SILENT = "silent"


class OutOfMemoryError(RuntimeError):
    """The name by which torch's is known."""


@pytest.fixture(autouse=True)
def answers(monkeypatch):
    """Each rank's reference is (seconds until it answers, its answer, or what it raises, DEAD or SILENT)."""

    async def wait(refs, timeout_s, what, key):
        [(delay, answer)] = refs
        if answer == SILENT or delay > timeout_s:
            await asyncio.sleep(timeout_s)
            raise RemoteError(f"waited {timeout_s:g} s for {what}; raise `{key}` if this is expected")
        await asyncio.sleep(delay)
        if answer == DEAD:
            raise RemoteError(DEAD)
        if isinstance(answer, Exception):
            raise RemoteError(f"while waiting for {what}: {type(answer).__name__}: {answer}") from answer
        return [answer]

    monkeypatch.setattr(module, "wait", wait)
    monkeypatch.setattr(module, "FAILURE_GRACE_S", 0.1)
    monkeypatch.setattr(module, "PULSE_S", 0.01)


def ask(*answers, timeout_s=0.3, ranks=None, **how):
    ranks = ranks or Ranks(lambda: [None] * len(answers))
    submit = lambda rank, worker: answers[rank]  # noqa: E731
    return asyncio.run(ranks.call(submit, timeout_s, "the update", "actor.timeout_s", **how)), ranks


def lost(*answers, match, **how):
    ranks = Ranks(lambda: [None] * len(answers))
    with pytest.raises(ActorsLost, match=match):
        ask(*answers, ranks=ranks, **how)
    with pytest.raises(ActorsLost, match=f"cannot be used for the update, .* lost before: .*{match}"):
        ask((0, 1), (0, 1), ranks=ranks)


def usable(*answers, match, **how):
    ranks = Ranks(lambda: [None] * len(answers))
    with pytest.raises(RemoteError, match=match) as raised:
        ask(*answers, ranks=ranks, **how)
    assert ask((0, "a"), (0, "b"), ranks=ranks)[0] == ["a", "b"]
    return raised.value


def test_results_come_in_rank_order_and_what_all_raise_alike_is_told_once():
    """The second answers long after the grace for ranks that hang with a failed one."""
    assert ask((0.05, "first"), (0, "second"))[0] == ["first", "second"]
    error = WeightParityError("is 0.2")
    found = usable((0, error), (0.25, error), match="^the update: WeightParityError: is 0.2$")
    assert found.__cause__ is error


CLOSED = RuntimeError("Connection closed by peer")
BOTH = "while waiting for actor rank 1: ActorDiedError: .*rank 0 .*closed by peer"


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        pytest.param((0, DEAD), (0, SILENT), "ActorDiedError", id="died"),
        pytest.param((0, 1), (0, SILENT), "waited 0.3 s for actor rank 1", id="silent"),
        pytest.param((0, SILENT), (0, SILENT), "waited 0.3 s for actor rank 0", id="all silent"),
        pytest.param((0, IndexError("x")), (0, 1), "IndexError: x", id="one failed"),
        pytest.param((0, IndexError("x")), (0, IndexError("x")), "IndexError: x", id="all failed at who knows what"),
        pytest.param((0, FilesError("x")), (0, 1), "FilesError: x", id="one only raised what all must"),
        pytest.param((0, FilesError("x")), (0.05, DEAD), "ActorDiedError", id="one died of it"),
        pytest.param((0, OutOfMemoryError("x")), (0, SILENT), "OutOfMemoryError", id="memory"),
        pytest.param((0, CLOSED), (0.05, DEAD), BOTH, id="a dead rank is named before those that failed with it"),
    ],
)
def test_anything_else_loses_the_actors(first, second, match):
    lost(first, second, match=match)


def test_ranks_that_hang_with_a_failed_one_are_not_waited_for():
    began = time.monotonic()
    lost((0, IndexError("x")), (0, SILENT), match="IndexError", timeout_s=60)
    assert time.monotonic() - began < 5


def test_separable_work_may_fail_on_one_rank():
    usable((0, OSError("gone")), (0.05, 1), match="OSError: gone", separable=True)
    lost((0, OSError("gone")), (0, SILENT), match="OSError: gone", separable=True)
    lost((0, OutOfMemoryError("x")), (0, 1), match="OutOfMemoryError: x", separable=True)
    lost((0, DEAD), (0, 1), match="ActorDiedError", separable=True)


@pytest.mark.parametrize("changes", [True, False])
def test_who_stops_waiting_for_an_update_loses_the_actors(changes):
    ranks = Ranks(lambda: [None, None])

    async def cancelled():
        async with asyncio.timeout(0.05):
            await ranks.call(lambda rank, _: (0.2, 1), 1, "the update", "actor.timeout_s", changes=changes)

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    if changes:
        with pytest.raises(
            ActorsLost, match=r"lost before: nobody waited for the end of the update \(CancelledError\)"
        ):
            ask((0, 1), (0, 1), ranks=ranks)
    else:
        assert ask((0, 1), (0, 1), ranks=ranks)[0] == [1, 1]


class Idle:
    """Ranks of which the second gives no sign of life from question number `after` on, but `answer`."""

    def __init__(self, after: int, answer: object) -> None:
        self.asked, self._after, self._answer = 0, after, answer
        first = SimpleNamespace(process=SimpleNamespace(remote=lambda: (0, "there")))
        second = SimpleNamespace(process=SimpleNamespace(remote=self._second))
        self.ranks = Ranks(lambda: [first, second])

    def _second(self) -> tuple[float, object]:
        self.asked += 1
        return 0, "there" if self.asked < self._after else self._answer


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        pytest.param(DEAD, "ActorDiedError", id="dead"),
        pytest.param(SILENT, r"waited 0.2 s for actor rank 1 \(a sign of life\); raise `key`", id="silent"),
    ],
)
def test_a_rank_that_is_lost_while_nothing_is_asked_of_it_is_noticed(answer, match):
    idle = Idle(3, answer)
    why = asyncio.run(asyncio.wait_for(idle.ranks.until_lost(0.2, "key"), 5))
    assert idle.asked == 3 and idle.ranks.lost == why
    with pytest.raises(ActorsLost, match=match):
        ask((0, 1), (0, 1), ranks=idle.ranks)


def test_a_silent_rank_has_no_more_time_than_any_idle_one_needs(monkeypatch):
    monkeypatch.setattr(module, "SILENT_S", 0.1)
    assert "waited 0.1 s" in asyncio.run(asyncio.wait_for(Idle(1, SILENT).ranks.until_lost(3600, "key"), 5))


def test_ranks_at_work_are_asked_for_no_sign_of_life_and_tell_of_their_loss_all_the_same():
    """A sign of life would queue behind the work, and its time would run out."""
    idle = Idle(10**9, None)

    async def both():
        watch = asyncio.create_task(idle.ranks.until_lost(0.05, "key"))
        work = [(0.3, 1), (0.3, 1)]
        assert await idle.ranks.call(lambda rank, _: work[rank], 1, "the update", "key") == [1, 1]
        assert idle.asked <= 1 and not watch.done()
        with pytest.raises(ActorsLost):
            await idle.ranks.call(lambda rank, _: (0, DEAD), 1, "the weight sync", "key")
        return await asyncio.wait_for(watch, 60)

    assert "ActorDiedError" in asyncio.run(both())


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [
        pytest.param({}, {}, ["1 begins", "1 ends", "2 begins", "2 ends"], id="its deadline begins with its turn"),
        pytest.param({"beside": True}, {}, ["1 begins", "2 begins", "2 ends", "1 ends"], id="beside"),
    ],
)
def test_calls_take_turns_unless_they_run_beside(first, second, order):
    """An engine joins the weight sync while the ranks write a checkpoint: nobody is lost."""
    ranks, seen = Ranks(lambda: [None]), []

    async def one(name, seconds, timeout_s, how):
        def submit(rank, worker):
            seen.append(f"{name} begins")
            return seconds, name

        await ranks.call(submit, timeout_s, name, "key", **how)
        seen.append(f"{name} ends")

    async def together():
        await asyncio.gather(one("1", 0.3, 1.0, first), one("2", 0.1, 0.2, second))

    asyncio.run(together())
    assert seen == order


def test_a_call_that_has_waited_does_not_go_to_the_ranks_that_came_meanwhile():
    ranks = Ranks(lambda: [None])

    async def replaced():
        first = asyncio.create_task(ranks.call(lambda *_: (0.1, 1), 1, "the save", "key"))
        second = asyncio.create_task(ranks.call(lambda *_: (0, 1), 1, "the sync", "key"))
        await asyncio.sleep(0.05)
        ranks.workers = [None]
        await first
        with pytest.raises(ActorsLost, match="the sync, .* others have taken their places"):
            await second

    asyncio.run(replaced())
