"""Which failures of a remote call say that its worker is lost, for good or as far as one knows."""

import asyncio
import gc
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayError, RaySystemError

from workers.remote import RemoteError, WorkerLost, wait


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        pytest.param(ActorDiedError(), True, id="its process ended"),
        pytest.param(ActorUnavailableError("gone", b"a" * 16), True, id="its node does not answer"),
        pytest.param(ObjectLostError("a" * 56, None, ""), True, id="its answer went with its node"),
        pytest.param(RaySystemError("who knows"), False, id="Ray failed"),
    ],
)
def test_a_worker_is_lost(error: RayError, lost: bool) -> None:
    async def fail() -> None:
        raise error

    with pytest.raises(RemoteError, match=f"while waiting for engine 3: {type(error).__name__}: ") as raised:
        asyncio.run(wait([fail()], 60.0, "engine 3", "rollout.timeout_s"))
    assert isinstance(raised.value, WorkerLost) == lost


def test_a_failure_that_nobody_waits_for_any_more_is_not_reported_by_the_event_loop() -> None:
    """Waits are cancelled and actors killed in one go where a run ends."""
    told: list[dict[str, Any]] = []

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context))
        ref: asyncio.Future[None] = loop.create_future()
        waiting = asyncio.create_task(wait([ref], 60.0, "judge 0", ""))
        await asyncio.sleep(0)
        waiting.cancel()
        if not ref.cancelled():  # as Python 3.12 and later do it, at once
            ref.set_exception(ActorDiedError())
        await asyncio.wait({waiting})
        assert waiting.cancelled()

    asyncio.run(whole())
    gc.collect()
    assert told == []
