"""Runs the policy's Python programs in the sandbox without blocking the event loop of a rollout function's worker. If
many programs come at once, some wait for a thread; that time does not count against the function's time limit."""

import asyncio

from dapo.sandbox import client
from dapo.sandbox.program import Outcome, Program
from dapo.turns.patience import queued


async def run(program: Program) -> Outcome:
    """Raises SandboxError if the sandbox failed, not the program."""
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def work() -> Outcome:
        loop.call_soon_threadsafe(begun.set)
        return client.run(program)

    running = loop.run_in_executor(None, work)
    try:
        with queued():
            await begun.wait()
        return await running
    finally:
        running.cancel()  # a program that has not begun never starts


async def interpret(source: str, max_chars: int) -> str:
    """Returns the program's standard output and, if it did not end normally, the reason: at most `max_chars` characters
    (then "..."). Raises SandboxError as `run` does."""
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
