"""Asks the Hugging Face hub once whether it has a model or data set: transformers and `datasets` try for half a minute
where no network is, and so for each file.

In: a hub name. Out: what is wrong, or nothing.
"""

import logging
import os
from pathlib import Path

HUB_S = 10.0

log = logging.getLogger(__name__)


def unreachable(name: str, kind: str) -> Exception | None:
    """Returns why a name can be read neither from the hub nor from its cache; None where it can, or nobody may ask
    (HF_HUB_OFFLINE). Where the cache has it and the hub does not answer, this process and those that it starts do not
    ask again. kind: "model" or "dataset"."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=HUB_S)
    except Exception as error:  # network, proxy, certificates, permissions: whatever the client raises
        if not cached_commit(name, kind):
            return error
        if getattr(error, "response", None) is None:  # nobody answered
            log.warning("the hub cannot be reached (%s); %s is read from its cache", type(error).__name__, name)
            os.environ["HF_HUB_OFFLINE"] = "1"
            constants.HF_HUB_OFFLINE = True
    return None


def cached_commit(name: str, kind: str) -> str:
    """Returns the commit that the hub's cache has for the newest one; "" where it has none."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=name, repo_type=kind)
    try:
        return (Path(constants.HF_HUB_CACHE) / folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
