"""Decides from a model's class alone, before the model is built, whether the actors can compute it."""

import ast
import inspect
import sys
from typing import Any

# All other attention implementations of transformers separate sequences by a mask over the whole micro-batch.
MASKLESS = ("auto", "flash_attention_2", "flash_attention_3", "flash_attention_4")
MASKS = {"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"}
OTHER = "; choose another architecture"
POSITIONS = "position_ids"  # the fifth argument of each function in MASKS


def why_not_packed(model: Any, base: Any, *, masked: bool) -> str:
    """Returns why a model would not keep the sequences of a packed micro-batch separate, or could not be called on
    them; "" if its class shows no reason.

    model: the class with the head. base: the class below the head, or None if unknown. masked: whether the attention
    implementation is not in `MASKLESS`.
    """
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
    """Whether the class's source file creates a causal mask without passing position ids (sequence starts)."""
    calls = ast.walk(ast.parse(inspect.getsource(sys.modules[model.__module__])))
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in MASKS
        and len(call.args) < 5
        and not {POSITIONS, None} & {keyword.arg for keyword in call.keywords}  # None: **kwargs, not inspected
        for call in calls
    )
