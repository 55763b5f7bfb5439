"""Answers in one turn: the simplest rollout function, and bit for bit what a run without one does."""

from dapo.turns.protocol import Generate, Trajectory
from dapo.types import Prompt, Sampling


async def rollout(prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
    """Returns what the policy samples."""
    return Trajectory(text=(await generate()).text)
