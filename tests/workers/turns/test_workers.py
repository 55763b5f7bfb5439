"""Workers of a rollout function that are replaced, with stand-ins for Ray's actors: one try is not enough."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dapo.config.sampling import RolloutFunctionConfig
from dapo.turns.protocol import Queued, Step, Trajectory
from workers.remote import RemoteError
from workers.turns import fleet as module
from workers.turns.fleet import START_ATTEMPTS, TurnFleet, TurnLost


def lost(failures: int, monkeypatch: pytest.MonkeyPatch) -> tuple[TurnFleet, list[str]]:
    """A fleet of one worker that was lost, and whose place took `failures` workers that did not start."""
    left, said = [failures], []

    async def start(self: TurnFleet, place: Any) -> str:
        if left[0]:
            left[0] -= 1
            raise RemoteError("its node is gone")
        place.ready.set()
        return ""

    async def dies() -> None:
        raise RemoteError("its process has ended")

    async def whole() -> TurnFleet:
        fleet = TurnFleet({}, RolloutFunctionConfig(path="one_turn", num_workers=1), warn=said.append)
        left[0] = 0
        await fleet.start("model", False, 1.0)
        left[0] = failures
        place = fleet._places[0]
        with pytest.raises(TurnLost):
            await fleet.answer(place, place.handle, dies())
        while fleet._tasks:
            await asyncio.wait(fleet._tasks)
        return fleet

    monkeypatch.setattr(TurnFleet, "_start", start)
    monkeypatch.setattr(TurnFleet, "_make", lambda self: object())
    monkeypatch.setattr(module, "_kill", lambda handle: None)
    return asyncio.run(whole()), said


def test_a_replacement_that_does_not_start_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, said = lost(START_ATTEMPTS - 1, monkeypatch)
    assert fleet._broken is None and fleet._places[0].ready.is_set()
    assert sum("did not start: its node is gone" in line for line in said) == START_ATTEMPTS - 1


def test_where_none_starts_the_run_hears_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _ = lost(START_ATTEMPTS, monkeypatch)
    assert "its node is gone" in str(fleet._broken)


def test_a_call_that_has_to_wait_for_a_place_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter([Queued(), Queued(), Trajectory(text="42")])

    async def answer(*given: Any) -> Step:
        return next(steps)

    worker = SimpleNamespace(begin=SimpleNamespace(remote=answer), go_on=SimpleNamespace(remote=answer))

    async def start(self: TurnFleet, place: Any) -> str:
        place.ready.set()
        return ""

    async def whole() -> Step:
        fleet = TurnFleet({}, RolloutFunctionConfig(path="one_turn", num_workers=1))
        await fleet.start("model", False, 1.0)
        call = await fleet.call("one")
        return await call.begin(None, None)

    monkeypatch.setattr(TurnFleet, "_start", start)
    monkeypatch.setattr(TurnFleet, "_make", lambda self: worker)
    assert asyncio.run(whole()) == Trajectory(text="42")


@pytest.mark.parametrize("when", ["from node to node", "during the run"])
def test_all_workers_have_one_text_of_the_function(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Another file on a node, or one that was edited before a worker was replaced: the run would go on with both."""
    digests = iter(["a", "b"] if when == "from node to node" else ["a", "a", *["b"] * START_ATTEMPTS])

    async def text(*given: Any) -> tuple[str, str]:
        return "", next(digests)

    async def whole() -> None:
        fleet = TurnFleet({}, RolloutFunctionConfig(path="/mine.py", num_workers=2))
        await fleet.start("model", False, 1.0)
        fleet._lose(fleet._places[1], fleet._places[1].handle, "it died")
        await asyncio.wait(fleet._tasks)
        await fleet.call("one")

    worker = SimpleNamespace(start=SimpleNamespace(remote=text))
    monkeypatch.setattr(TurnFleet, "_make", lambda self: worker)
    monkeypatch.setattr(module, "_kill", lambda handle: None)
    with pytest.raises(RemoteError, match=r"`rollout.function.path` \(/mine.py\) differs from node to node or has"):
        asyncio.run(whole())
