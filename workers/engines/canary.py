"""Makes the canary of an engine that has started again: a few tokens whose log-probabilities the actors compute too."""

import numpy as np

from dapo.types import Int32Array, Response, Sampling, TrainSequence

CANARY = Sampling(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=16)


def canary_sequence(prompt: Int32Array, response: Response) -> TrainSequence:
    """Returns the engine's answer to a prompt [P] as the actors take it."""
    return TrainSequence(
        token_ids=np.concatenate([prompt, response.token_ids]),
        num_prompt_tokens=len(prompt),
        rollout_logprobs=response.rollout_logprobs,
        advantage=0.0,
        token_weight=0.0,
        staleness=np.zeros(len(response.token_ids), dtype=np.int32),
    )
