"""The canary of a restarted engine: a few tokens, of which engine and actors compare the log-probabilities."""

import numpy as np

from dapo.types import Int32Array, Response, Sampling, TrainSequence

CANARY = Sampling(n=1, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=16)


def canary_sequence(prompt: Int32Array, response: Response) -> TrainSequence:
    return TrainSequence(
        token_ids=np.concatenate([prompt, response.token_ids]),
        num_prompt_tokens=len(prompt),
        rollout_logprobs=response.rollout_logprobs,
        advantage=0.0,
        token_weight=0.0,
        staleness=np.zeros(len(response.token_ids), dtype=np.int32),
    )
