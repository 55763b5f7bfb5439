"""Runs Python programs that the policy wrote, in the sandbox, beside the event loop of a rollout function's worker.

In: a program. Out: its outcome; for `tool_use`, what is to be read of it. Of many that come at once some wait for a
thread, which does not count against the time of the function.
"""

import asyncio
from itertools import count

from dapo.sandbox import shared
from dapo.sandbox.program import Outcome, Program, SandboxError
from dapo.turns.patience import queued

STANDSTILL_S = 600.0  # in which none of the programs that wait has begun: the longest of those that run ends before

_begun = count(1)
_latest = 0  # number of the program that began last


async def run(program: Program) -> Outcome:
    """Returns what a program did. Raises SandboxError where the machinery failed, and not the program."""
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def work() -> Outcome:
        global _latest
        _latest = next(_begun)
        loop.call_soon_threadsafe(begun.set)
        return shared.run(program)

    running = loop.run_in_executor(None, work)
    try:
        with queued():
            await _place(begun)
        return await running
    finally:
        running.cancel()  # one that has not begun never does


async def _place(begun: asyncio.Event) -> None:
    """Waits until a program has begun, as long as others do. Raises SandboxError where none does."""
    while not begun.is_set():
        before = _latest
        try:
            await asyncio.wait_for(begun.wait(), STANDSTILL_S)
        except TimeoutError:
            if _latest == before:
                raise SandboxError(f"no program began within {STANDSTILL_S:g} s: the sandbox stands still") from None


async def interpret(source: str, max_chars: int) -> str:
    """Returns what the program wrote to standard output, then why it ended where that was not by itself: at most
    `max_chars` characters. Raises SandboxError as `run` does."""
    outcome = await run(Program(source=source))
    shown = "\n".join(filter(None, [outcome.stdout.strip(), _fault(outcome)])) or "no output"
    return shown if len(shown) <= max_chars else f"{shown[:max_chars]}..."


def _fault(outcome: Outcome) -> str:
    if outcome.succeeded:
        return ""
    if outcome.reason:
        return f"error: stopped at its limit ({outcome.reason})"
    last = outcome.stderr.strip().rpartition("\n")[2]
    return f"error: {last or f'it ended with status {outcome.exit}'}"
