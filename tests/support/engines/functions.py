"""Rollout functions in the test's own process, where the driver has its workers."""

from collections.abc import Awaitable, Callable
from typing import Any

from dapo.tiny.tokenizer import make_tokenizer
from dapo.turns.protocol import Failed, Generated, Step
from dapo.turns.session import Session
from dapo.types import Prompt, Sampling
from workers.turns.fleet import TurnLost

TOKENIZER = make_tokenizer()


class LocalCall:
    def __init__(self, functions: "LocalFunctions", name: str) -> None:
        self._functions, self.name, self.session = functions, name, None

    async def begin(self, prompt: Prompt, sampling: Sampling) -> Step:
        functions = self._functions
        self.session = Session(functions.function, functions.kwargs, prompt, sampling, TOKENIZER)
        return self._checked(await self.session.step(functions.timeout_s))

    async def resume(self, generated: Generated) -> Step:
        return self._checked(await self.session.resume(generated, self._functions.timeout_s))

    def _checked(self, step: Step) -> Step:
        if isinstance(step, Failed):
            raise TurnLost(step.detail)
        return step

    def close(self, *, ended: bool) -> None:
        self._functions.open.discard(self.name)
        if self.session is not None:
            self.session.close()


class LocalFunctions:
    """Stands in for `workers.turns.fleet.TurnFleet`. open: calls that have not ended; names: of all there were."""

    def __init__(self, function: Callable[..., Awaitable[Any]], timeout_s: float = 30.0, **kwargs: Any) -> None:
        self.function, self.timeout_s, self.kwargs = function, timeout_s, kwargs
        self.open: set[str] = set()
        self.names: list[str] = []
        self.respawned = 0

    async def call(self, name: str) -> LocalCall:
        self.open.add(name)
        self.names.append(name)
        return LocalCall(self, name)
