"""Checks once whether the Hugging Face hub has a model or data set. Without a network, transformers and `datasets`
would retry for half a minute per file."""

import logging
import os
from pathlib import Path

HUB_S = 10.0

log = logging.getLogger(__name__)


def unreachable(name: str, kind: str) -> Exception | None:
    """Returns why a name can be read neither from the hub nor from its cache; None if it can, or if HF_HUB_OFFLINE is
    set.

    If the cache has it and the hub does not answer, sets HF_HUB_OFFLINE for this process and its children. kind:
    "model" or "dataset".
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=HUB_S)
    except Exception as error:  # network, proxy, certificates, permissions: many exception types
        if not cached_commit(name, kind):
            return error
        if getattr(error, "response", None) is None:  # no HTTP response
            log.warning("the hub cannot be reached (%s); %s is read from its cache", type(error).__name__, name)
            os.environ["HF_HUB_OFFLINE"] = "1"
            constants.HF_HUB_OFFLINE = True
    return None


def cached_commit(name: str, kind: str) -> str:
    """Returns the commit of `main` in the hub's cache; "" if there is none."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=name, repo_type=kind)
    try:
        return (Path(constants.HF_HUB_CACHE) / folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
