"""Runs a rollout function for one response with asyncio, from one `Ask` to the next."""

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from dapo.data.template import rendered
from dapo.data.tokenizer import special_tokens, spelled_out
from dapo.ground.user_code import describe
from dapo.turns.patience import Stopwatch, watch
from dapo.turns.protocol import Ask, Failed, Generated, Queued, Step, Trajectory
from dapo.types import Prompt, Sampling

PLACEHOLDER = "dapo turn"  # replaces the policy's text when rendering the chat template
LEFT = (
    "a call of `generate` was cancelled, and the policy answers it all the same: no turn can be taken back; set time "
    "limits around other work alone"
)

Function = Callable[..., Awaitable[Any]]


class Turns:
    """Implements `dapo.turns.protocol.Generate` for one function call."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._template_kwargs = template_kwargs or {}
        self.asked: asyncio.Queue[Ask] = asyncio.Queue()
        self.left = False  # whether a call was cancelled before its answer
        self._last: tuple[int, ...] = ()
        self._answer: asyncio.Future[Generated] | None = None

    async def __call__(
        self, token_ids: Sequence[int] = (), *, max_tokens: int | None = None, stop: str | Sequence[str] | None = None
    ) -> Generated:
        """Raises ValueError for invalid tokens or arguments, or if the last call was not awaited or was cancelled."""
        if self.left:
            raise ValueError(LEFT)
        if self._answer is not None:
            raise ValueError("`generate` was called before its last call had ended; await one after the other")
        ids, size = tuple(int(token) for token in token_ids), len(self.tokenizer)
        if wrong := [token for token in ids if not 0 <= token < size]:
            raise ValueError(f"`token_ids` holds {wrong[0]}, and the tokenizer has the tokens 0 to {size - 1}")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"`max_tokens` ({max_tokens}) must be at least 1; leave it out for no cap of this turn")
        strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if "" in strings:
            raise ValueError("`stop` holds an empty string, which would end every turn before it begins")
        self._answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(Ask(token_ids=ids, max_tokens=max_tokens, stop=strings))
        try:
            generated = await self._answer
        except asyncio.CancelledError:
            self.left = True
            raise
        finally:
            self._answer = None
        self._last = generated.token_ids or self._last  # empty if there was no room, not even for `ids`
        return generated

    def after(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """See `dapo.turns.protocol.Generate`. Raises ValueError if the template drops a turn."""
        special = special_tokens(self.tokenizer)
        plain = [(role, spelled_out(special, content)) for role, content in messages]  # no control tokens
        turns = (("user", PLACEHOLDER[::-1]), ("assistant", PLACEHOLDER), *plain)
        _, found, rest = rendered(self.tokenizer, turns, self._template_kwargs).rpartition(PLACEHOLDER)
        if not found:
            raise ValueError("the chat template drops what the assistant said; append tokens of your own instead")
        ids: list[int] = self.tokenizer(rest, add_special_tokens=False)["input_ids"]
        return ids[1:] if self._last and ids[:1] == [self._last[-1]] else ids

    def answer(self, generated: Generated) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(generated)


class Session:
    def __init__(
        self,
        function: Function,
        kwargs: dict[str, Any],
        prompt: Prompt,
        sampling: Sampling,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._turns = Turns(tokenizer, template_kwargs)
        self._watch = Stopwatch()
        self._task = asyncio.ensure_future(_called(function, prompt, self._turns, sampling, kwargs, self._watch))

    async def step(self, timeout_s: float) -> Step:
        """Returns the function's next step within `timeout_s`, or `Queued` if it spent part of that time queued."""
        until = time.monotonic() + timeout_s
        asked = asyncio.ensure_future(self._turns.asked.get())
        try:
            left = timeout_s
            while left > 0:
                left = min(until - time.monotonic(), timeout_s - self._watch.spent())
                await asyncio.wait({asked, self._task}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    return asked.result()
                if self._task.done():
                    return self._end()
        finally:
            asked.cancel()
        if self._watch.spent() < timeout_s:
            return Queued()
        return Failed(detail=f"it did not go on within {timeout_s:g} s (`rollout.function.timeout_s`)")

    def _end(self) -> Trajectory | Failed:
        if self._task.cancelled():
            return Failed(detail="it was cancelled")
        if (error := self._task.exception()) is not None:
            place = traceback.extract_tb(error.__traceback__)[-1]
            return Failed(detail=f"{describe(error)} at line {place.lineno} of {place.filename}")
        result = self._task.result()
        if not isinstance(result, Trajectory) or not isinstance(result.text, str):
            return Failed(detail=f"it returned {type(result).__name__}; it must return a Trajectory with text")
        if self._turns.left:
            return Failed(detail=LEFT)
        # Replaces lone surrogates, which the model's JSON may produce: checkpoints cannot store them.
        return Trajectory(text=result.text.encode("utf-8", "replace").decode())

    async def resume(self, generated: Generated, timeout_s: float) -> Step:
        self._watch.restart()
        self._turns.answer(generated)
        return await self.step(timeout_s)

    def close(self) -> None:
        self._task.cancel()


async def _called(
    function: Function, prompt: Prompt, turns: Turns, sampling: Sampling, kwargs: dict[str, Any], own: Stopwatch
) -> Any:
    watch.set(own)
    try:
        return await function(prompt, turns, sampling, **kwargs)
    except SystemExit as error:  # a task would end the process and all other calls
        raise RuntimeError(f"it wanted to end the process (SystemExit: {error})") from error
