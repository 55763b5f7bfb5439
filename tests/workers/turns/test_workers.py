"""Workers of a rollout function that are replaced, with stand-ins for Ray's actors: one try is not enough."""

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from dapo.config.compose import compose
from dapo.config.paths import resolve_path
from dapo.config.sampling import RolloutFunctionConfig
from dapo.driver.fleet import create_functions, start_functions
from dapo.turns.protocol import Ask, Generated, Queued, Step, Trajectory
from dapo.types import Sampling
from dapo.workers.remote import RemoteError
from dapo.workers.supervise import START_ATTEMPTS
from dapo.workers.turns import TurnFleet, TurnLost, TurnWorker
from tests.support.fakes import make_prompt


@pytest.fixture(autouse=True)
def _no_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dapo.workers.supervise._kill", lambda handle: None)


def actors(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> None:
    """Puts stand-ins with these methods in the places of Ray's actors."""
    remote = {name: SimpleNamespace(remote=method) for name, method in methods.items()}
    monkeypatch.setattr(TurnFleet, "_make", lambda self, index: SimpleNamespace(**remote))


@pytest.mark.parametrize("failures", [START_ATTEMPTS - 1, START_ATTEMPTS], ids=["one-starts", "none-starts"])
def test_a_replacement_that_does_not_start_is_replaced_too(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    """Where none starts, the run hears why."""
    left, said = [0], []

    async def start(self: TurnFleet, handle: Any, index: int, timeout_s: float) -> str:
        if left[0]:
            left[0] -= 1
            raise RemoteError("its node is gone")
        return ""

    async def dies() -> None:
        raise RemoteError("its process has ended")

    async def whole() -> TurnFleet:
        fleet = TurnFleet({}, RolloutFunctionConfig(path="one_turn", num_workers=1), warn=said.append)
        await fleet.start("model", False, 60.0)
        left[0] = failures
        worker = fleet.workers.all[0]
        with pytest.raises(TurnLost):
            await fleet.answer(worker, worker.handle, dies())
        while fleet.workers._tasks:
            await asyncio.wait(fleet.workers._tasks)
        return fleet

    monkeypatch.setattr(TurnFleet, "_start", start)
    actors(monkeypatch)
    fleet = asyncio.run(whole())
    if failures == START_ATTEMPTS:
        assert "its node is gone" in str(fleet.workers.broken)
    else:
        assert fleet.workers.broken is None and fleet.workers.all[0].up
        assert sum("did not start: its node is gone" in line for line in said) == failures


def test_a_call_that_has_to_wait_for_a_place_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter([Queued(), Queued(), Trajectory(text="42")])

    async def answer(*given: Any) -> Step:
        return next(steps)

    async def start(*given: Any) -> tuple[str, str]:
        return "", "digest"

    async def whole() -> Step:
        fleet = TurnFleet({}, RolloutFunctionConfig(path="one_turn", num_workers=1))
        await fleet.start("model", False, 1.0)
        call = await fleet.call("one")
        return await call.begin(None, None)

    actors(monkeypatch, start=start, begin=answer, go_on=answer)
    assert asyncio.run(whole()) == Trajectory(text="42")


def test_a_worker_gets_what_the_person_gave_the_chat_template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve_path("pkg://dapo.tiny/base"), model)
    with (model / "chat_template.jinja").open("a") as file:
        file.write("{% if enable_thinking is false %}(no thought){% endif %}")
    keys = [f"model.path={model}", "rollout.function.path=retry", "data.chat_template_kwargs.enable_thinking=false"]
    cfg = compose(keys, "dapo_tiny")
    worker = TurnWorker()
    actors(monkeypatch, start=worker.start)

    async def whole() -> Step:
        functions = create_functions(cfg, SimpleNamespace(rewards=dict))
        await start_functions(cfg, functions)
        await worker.begin("one", make_prompt(1), Sampling(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=9))
        return await worker.resume("one", Generated(token_ids=(5,), text="5", finish_reason="stop"))

    step = asyncio.run(whole())
    assert isinstance(step, Ask)
    assert AutoTokenizer.from_pretrained(model).decode(step.token_ids).endswith("<|assistant|>(no thought)")


@pytest.mark.parametrize("digests", ["ab", "aa" + "b" * START_ATTEMPTS], ids=["from node to node", "during the run"])
def test_all_workers_have_one_text_of_the_function(monkeypatch: pytest.MonkeyPatch, digests: str) -> None:
    """Another file on a node, or one that was edited before a worker was replaced: the run would go on with both."""
    left = iter(digests)

    async def text(*given: Any) -> tuple[str, str]:
        return "", next(left)

    async def whole() -> None:
        fleet = TurnFleet({}, RolloutFunctionConfig(path="/mine.py", num_workers=2))
        await fleet.start("model", False, 1.0)
        worker = fleet.workers.all[1]
        await fleet.workers.lose(worker, worker.handle, "it died")
        await fleet.call("one")

    actors(monkeypatch, start=text)
    with pytest.raises(RemoteError, match=r"`rollout.function.path` \(/mine.py\) differs from node to node or has"):
        asyncio.run(whole())
