"""Says by a model's class alone whether the actors can compute it, before it is built.

In: classes of transformers' or of a model's own code. Out: what stands in the way, for a message.
"""

import inspect
from typing import Any


def why_not_packed(model: Any, base: Any) -> str:
    """Returns why a model would not keep the sequences of a micro-batch apart, or could not be called on them; "" where
    its class says nothing of it. model: the class with the head. base: that of what lies below it, None where it is
    unknown."""
    if model._is_stateful:
        return "keeps a state from token to token, which would run from one sequence of a micro-batch into the next"
    taken = None if base is None else inspect.signature(base.forward).parameters.values()
    if not model._supports_attention_backend or (taken and all(each.kind is not each.VAR_KEYWORD for each in taken)):
        return "computes attention by itself, over all sequences of a micro-batch at once"
    return ""
