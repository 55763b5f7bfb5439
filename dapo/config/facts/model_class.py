"""Says by a model's class alone whether the actors can compute it, before it is built.

In: classes of transformers' or of a model's own code. Out: what stands in the way and what to do, for a message.
"""

import ast
import inspect
import sys
from typing import Any

# Every other attention of transformers keeps sequences apart by a mask of the whole micro-batch.
MASKLESS = ("auto", "flash_attention_2", "flash_attention_3", "flash_attention_4")
MASKS = {"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"}
OTHER = "; choose another architecture"
POSITIONS = "position_ids"  # the fifth argument of each of them


def why_not_packed(model: Any, base: Any, *, masked: bool) -> str:
    """Returns why a model would not keep the sequences of a micro-batch apart, or could not be called on them; "" where
    its class says nothing of it. model: the class with the head. base: that of what lies below it, None where it is
    unknown. masked: whether its attention is none of `MASKLESS`."""
    if model._is_stateful:
        return f"keeps a state from token to token, which runs from one sequence of a micro-batch into the next{OTHER}"
    taken = None if base is None else inspect.signature(base.forward).parameters.values()
    if not model._supports_attention_backend or (taken and all(each.kind is not each.VAR_KEYWORD for each in taken)):
        return f"computes attention by itself, over all sequences of a micro-batch at once{OTHER}"
    if masked and _masks_all(base or model):
        return (
            "makes its mask without the positions of tokens, over all sequences of a micro-batch at once; set "
            "`model.attn_implementation=auto`, which needs no mask"
        )
    return ""


def _masks_all(model: Any) -> bool:
    """Returns whether the file of a class asks for a causal mask and does not say where sequences begin."""
    calls = ast.walk(ast.parse(inspect.getsource(sys.modules[model.__module__])))
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in MASKS
        and len(call.args) < 5
        and not {POSITIONS, None} & {keyword.arg for keyword in call.keywords}  # None: those of a dict, unread
        for call in calls
    )
