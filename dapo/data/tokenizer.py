"""Loads and checks the model's tokenizer on the driver, and tokenizes texts."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapo.config.actor import ModelConfig
from dapo.config.facts.model_shape import UnknownShape, read_config, text_part
from dapo.config.paths import not_on_hub
from dapo.data.files import shown
from dapo.types import Int32Array, Prompt

TEXTS_AT_A_TIME = 1024
TEXT = "What is 12 + 30? Give your reasons; end with 'Answer: N'."


def load_tokenizer(model: ModelConfig) -> Any:
    """Returns the tokenizer of `model.path`. Raises ValueError if it does not load, if text does not survive encoding
    and decoding, or if there is no end-of-sequence token in the tokenizer (used by the engines) or in the model's
    config files."""
    from transformers import AutoTokenizer

    path = model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # broken model files raise many types
        if Path(path).is_dir():
            what, remedy = (
                f"`model.path` ({path}): no tokenizer: it does not load "
                f"({type(error).__name__}: {' '.join(str(error).split())})",
                "copy or download the model again",
            )
        else:
            what, remedy = not_on_hub("model.path", path, error)
        raise ValueError(f"{what}; {remedy}") from error
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    if not ids:  # transformers makes an empty tokenizer if files are missing
        raise ValueError(
            f"`model.path` ({path}): its {type(tokenizer).__name__} makes no tokens of text, as where tokenizer.json "
            "is missing; copy or download the model again"
        )
    if "".join((back := str(tokenizer.decode(ids))).split()) != "".join(TEXT.split()):
        raise ValueError(
            f"`model.path` ({path}): {TEXT!r} is {back!r} after encoding and decoding; see tokenizer.json for lost "
            "characters, or copy or download the model again"
        )
    if tokenizer.eos_token_id is None and not _ends(model):
        raise ValueError(
            f"`model.path` ({path}): neither its tokenizer (`eos_token`) nor generation_config.json or config.json "
            "(`eos_token_id`) has an end of sequence, so that every response would run into "
            "`data.max_response_length`; set one"
        )
    return tokenizer


def _ends(model: ModelConfig) -> bool:
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model.path).eos_token_id is not None
    except OSError:  # no generation_config.json: vLLM then uses config.json
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        return getattr(config, "eos_token_id", None) is not None


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[Int32Array]:
    """Returns the tokens of each text, in batches: one call takes about a hundred bytes per token. No special tokens
    are added, because the chat template writes them."""
    found: list[Int32Array] = []
    for start in range(0, len(texts), TEXTS_AT_A_TIME):
        part = list(texts[start : start + TEXTS_AT_A_TIME])
        ids = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        found += [np.asarray(tokens, dtype=np.int32) for tokens in ids]
    return found


def special_tokens(tokenizer: Any) -> list[str]:
    """Returns the texts of the special tokens, longest first."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)


def spelled_out(special: Sequence[str], text: str) -> str:
    """Returns the text with a space inserted in each special token, so that it is tokenized as plain text."""
    for token in special:
        for _ in range(2):  # a token may overlap itself
            if len(token) > 1 and token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def check_rows(prompts: Iterable[Prompt], path: str) -> None:
    """Raises ValueError for a prompt with a token that has no row in the model's embedding. path: `model.path`."""
    try:
        rows = text_part(read_config(path)).get("vocab_size")
    except UnknownShape:
        return
    highest = max(prompts, key=lambda prompt: prompt.token_ids.max(initial=0), default=None)
    if isinstance(rows, int) and highest is not None and (token := int(highest.token_ids.max(initial=0))) >= rows:
        raise ValueError(
            f"`model.path` ({path}): its tokenizer gives token {token} to a prompt ({shown(highest.text)}), and "
            f"`vocab_size` in config.json is {rows}; take the tokenizer that belongs to these weights"
        )
