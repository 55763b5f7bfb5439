"""Runs rollout functions as a Ray actor: many calls on one event loop, each from one turn to the next."""

import asyncio
from typing import Any

from dapo.config.reward import LimitsConfig
from dapo.config.sampling import RolloutFunctionConfig
from dapo.sandbox import shared
from dapo.turns.loading import digest_of, load, runs_programs
from dapo.turns.protocol import Ask, Generated, Queued, Step
from dapo.turns.session import Session
from dapo.types import Prompt, Sampling


class TurnWorker:
    """Holds the calls that have not ended, by name; `start` comes first."""

    async def start(
        self,
        spec: RolloutFunctionConfig,
        model_path: str,
        trust_remote_code: bool,
        limits: LimitsConfig,
        template_kwargs: dict[str, Any],
    ) -> tuple[str, str]:
        """Loads function and tokenizer, and starts the sandbox where the function runs programs of the model. Returns
        how these are confined, and the digest of the function's file. Raises ValueError as `dapo.turns.loading.load`
        does, and where they cannot be."""
        from transformers import AutoTokenizer

        self._spec, self._function, self._template_kwargs = spec, load(spec), template_kwargs
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        self._sessions: dict[str, Session] = {}
        digest = digest_of(self._function)
        if not runs_programs(self._function, spec.kwargs):
            return "", digest
        unconfined = limits.allow_unconfined
        programs = await asyncio.to_thread(shared.start, limits.sandbox, allow_unconfined=unconfined)
        return programs.way.describe(), digest

    async def begin(self, name: str, prompt: Prompt, sampling: Sampling) -> Step:
        """Calls the function; returns what it wants first."""
        kwargs, given = self._spec.kwargs, self._template_kwargs
        session = Session(self._function, kwargs, prompt, sampling, self._tokenizer, given)
        self._sessions[name] = session
        return self._kept(name, await session.step(self._spec.timeout_s))

    async def resume(self, name: str, generated: Generated) -> Step:
        """Hands over what a call asked for; returns what it wants next."""
        return self._kept(name, await self._sessions[name].resume(generated, self._spec.timeout_s))

    async def go_on(self, name: str) -> Step:
        """Returns what a call that was queued wants next."""
        return self._kept(name, await self._sessions[name].step(self._spec.timeout_s))

    async def drop(self, name: str) -> None:
        """Ends a call that is not wanted any more."""
        if (session := self._sessions.pop(name, None)) is not None:
            session.close()

    def _kept(self, name: str, step: Step) -> Step:
        if not isinstance(step, Ask | Queued) and (session := self._sessions.pop(name, None)) is not None:
            session.close()
        return step
