"""Answers in one turn: the simplest rollout function; identical, bit for bit, to a run without one."""

from dapo.turns.protocol import Generate, Trajectory
from dapo.types import Prompt, Sampling


async def rollout(prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
    return Trajectory(text=(await generate()).text)
