"""Lets the policy try again: after its answer it is told to check it, and its last answer counts.

The feedback is the same for right and wrong answers, so that it gives nothing away.
"""

from dapo.turns.protocol import Generate, Trajectory
from dapo.types import Prompt, Sampling

FEEDBACK = "Check your answer step by step, then give your final answer in the same form again."


async def rollout(
    prompt: Prompt, generate: Generate, sampling: Sampling, *, attempts: int = 2, feedback: str = FEEDBACK
) -> Trajectory:
    """Returns the last of so many attempts; an attempt that reaches the response's cap is the last one."""
    answer = await generate()
    for _ in range(attempts - 1):
        if answer.finish_reason != "stop":
            break
        again = await generate(generate.after([("user", feedback)]))
        if not again.token_ids:  # the feedback does not fit: the answer before it stands
            break
        answer = again
    return Trajectory(text=answer.text)
