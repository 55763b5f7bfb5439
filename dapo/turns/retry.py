"""Asks the policy to check its answer and answer again; the last answer counts. The feedback is the same for correct
and wrong answers, so that it reveals nothing."""

from dapo.turns.protocol import Generate, Trajectory
from dapo.types import Prompt, Sampling

FEEDBACK = "Check your answer step by step, then give your final answer in the same form again."


async def rollout(
    prompt: Prompt, generate: Generate, sampling: Sampling, *, attempts: int = 2, feedback: str = FEEDBACK
) -> Trajectory:
    """Returns the last of `attempts` answers, or the first one that reaches the response's cap."""
    answer = await generate()
    for _ in range(attempts - 1):
        if answer.finish_reason != "stop":
            break
        again = await generate(generate.after([("user", feedback)]))
        if not again.token_ids:  # the feedback does not fit: keep the previous answer
            break
        answer = again
    return Trajectory(text=answer.text)
