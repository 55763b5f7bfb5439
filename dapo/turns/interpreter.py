"""Runs a Python program that the policy wrote, in the sandbox, for `tool_use`: its text in, what is to be read out."""

import asyncio

from dapo.sandbox import shared
from dapo.sandbox.program import Outcome, Program


async def interpret(source: str, max_chars: int) -> str:
    """Returns what the program wrote to standard output, then why it ended where that was not by itself: at most
    `max_chars` characters. Raises SandboxError where the machinery failed, and not the program."""
    outcome = await asyncio.to_thread(shared.run, Program(source=source))
    shown = "\n".join(filter(None, [outcome.stdout.strip(), _fault(outcome)])) or "no output"
    return shown if len(shown) <= max_chars else f"{shown[:max_chars]}..."


def _fault(outcome: Outcome) -> str:
    if outcome.succeeded:
        return ""
    if outcome.reason:
        return f"error: stopped at its limit ({outcome.reason})"
    last = outcome.stderr.strip().rpartition("\n")[2]
    return f"error: {last or f'it ended with status {outcome.exit}'}"
