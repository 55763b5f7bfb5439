"""A Ray actor that runs many rollout function calls on one event loop."""

import asyncio
from typing import Any

from dapo.config.reward import LimitsConfig
from dapo.config.sampling import RolloutFunctionConfig
from dapo.sandbox import client
from dapo.turns.loading import digest_of, load, runs_programs
from dapo.turns.protocol import Ask, Generated, Queued, Step
from dapo.turns.session import Session
from dapo.types import Prompt, Sampling


class TurnWorker:
    """Keeps its unfinished calls by name; `start` must be called first."""

    async def start(
        self,
        spec: RolloutFunctionConfig,
        model_path: str,
        trust_remote_code: bool,
        limits: LimitsConfig,
        template_kwargs: dict[str, Any],
    ) -> tuple[str, str]:
        """Loads function and tokenizer, and starts the sandbox if the function runs programs of the model. Returns how
        these are sandboxed, and the digest of the function's file. Raises ValueError as `dapo.turns.loading.load` does,
        and if the sandbox cannot be set up."""
        from transformers import AutoTokenizer

        self._spec, self._function, self._template_kwargs = spec, load(spec), template_kwargs
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        self._sessions: dict[str, Session] = {}
        digest = digest_of(self._function)
        if not runs_programs(self._function, spec.kwargs):
            return "", digest
        unconfined = limits.allow_unconfined
        programs = await asyncio.to_thread(client.start, limits.sandbox, allow_unconfined=unconfined)
        return programs.way.describe(), digest

    async def begin(self, name: str, prompt: Prompt, sampling: Sampling) -> Step:
        kwargs, given = self._spec.kwargs, self._template_kwargs
        session = Session(self._function, kwargs, prompt, sampling, self._tokenizer, given)
        self._sessions[name] = session
        return self._kept(name, await session.step(self._spec.timeout_s))

    async def resume(self, name: str, generated: Generated) -> Step:
        return self._kept(name, await self._sessions[name].resume(generated, self._spec.timeout_s))

    async def go_on(self, name: str) -> Step:
        """Returns the next step of a call that returned `Queued`."""
        return self._kept(name, await self._sessions[name].step(self._spec.timeout_s))

    async def drop(self, name: str) -> None:
        if (session := self._sessions.pop(name, None)) is not None:
            session.close()

    def _kept(self, name: str, step: Step) -> Step:
        if not isinstance(step, Ask | Queued) and (session := self._sessions.pop(name, None)) is not None:
            session.close()
        return step
