"""Rollout functions in the test's own process, where the driver has its workers."""

from collections.abc import Awaitable, Callable
from typing import Any

from dapo.tiny.tokenizer import make_tokenizer
from dapo.turns.protocol import Failed, Generated, Step
from dapo.turns.session import Session
from dapo.types import Prompt, Sampling
from dapo.workers.turns import TurnLost

TOKENIZER = make_tokenizer()


class LocalCall:
    def __init__(self, functions: "LocalFunctions", name: str) -> None:
        self._functions, self.name, self.session = functions, name, None

    async def begin(self, prompt: Prompt, sampling: Sampling) -> Step:
        self.session = Session(self._functions.function, {}, prompt, sampling, TOKENIZER)
        return await self._checked(self.session.step(self._functions.timeout_s))

    async def resume(self, generated: Generated) -> Step:
        return await self._checked(self.session.resume(generated, self._functions.timeout_s))

    async def _checked(self, work: Awaitable[Step]) -> Step:
        if isinstance(step := await work, Failed):
            raise TurnLost(step.detail)
        return step

    def close(self, *, ended: bool) -> None:
        self._functions.open.discard(self.name)
        if self.session is not None:
            self.session.close()


class LocalFunctions:
    """Stands in for `workers.turns.TurnFleet`. open: calls that have not ended; names: of all there were."""

    def __init__(self, function: Callable[..., Awaitable[Any]], timeout_s: float = 30.0) -> None:
        self.function, self.timeout_s = function, timeout_s
        self.open: set[str] = set()
        self.names: list[str] = []

    async def call(self, name: str) -> LocalCall:
        self.open.add(name)
        self.names.append(name)
        return LocalCall(self, name)
