"""Asks the Hugging Face hub once, before a run: whether it has a model or data set, and whether it takes a push.
Without a network, transformers and `datasets` would retry for half a minute per file."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

HUB_S = 5.0

log = logging.getLogger(__name__)
_silent: Exception | None = None  # why the hub was not reached


def unreachable(name: str, kind: str) -> Exception | None:
    """Returns why a name can be read neither from the hub nor from its cache; None if it can, or if HF_HUB_OFFLINE is
    set.

    If the hub does not answer within `HUB_S`, sets HF_HUB_OFFLINE for this process and its children, and asks no more.
    kind: "model" or "dataset".
    """
    global _silent
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and _silent is None:
        return None
    error = _silent or _asked(name, kind)
    if error is None:
        return None
    cached = bool(cached_commit(name, kind))
    if _silent is None and getattr(error, "response", None) is None and not isinstance(error, ValueError):
        _silent, constants.HF_HUB_OFFLINE = error, True
        os.environ["HF_HUB_OFFLINE"] = "1"
        if cached:
            log.warning("the hub cannot be reached (%s); what its cache has is read", type(error).__name__)
    return None if cached else error


def silence() -> Exception | None:
    """Returns why the hub was not reached, if `unreachable` has found that."""
    return _silent


def _asked(name: str, kind: str) -> Exception | None:
    """Returns why the hub did not say that it has `name`. In a thread, because looking up an address has no limit."""
    from huggingface_hub import HfApi

    found: list[Exception | None] = []

    def ask() -> None:
        try:
            HfApi().repo_info(name, repo_type=kind, timeout=HUB_S)
            found.append(None)
        except Exception as error:  # network, proxy, certificates, permissions: many exception types
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_S)
    return found[0] if found else TimeoutError(f"no answer within {HUB_S:g} s")


def cached_commit(name: str, kind: str) -> str:
    """Returns the commit of `main` in the hub's cache; "" if there is none."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    try:
        folder = repo_folder_name(repo_id=name, repo_type=kind)
        return (Path(constants.HF_HUB_CACHE) / folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # ValueError: no name that a repository may have, or no text
        return ""


def why_not_pushed(repository: str, warn: Callable[[str], None]) -> str:
    """Returns why nothing can be pushed to `repository`, with the remedy; "" if it can. warn: told if the hub does not
    answer, which may pass."""
    import httpx
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import build_hf_headers

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set; unset it, or push by hand after the run"
    if not (token := get_token()):
        return "there is no token; set HF_TOKEN to one that may write, or run `hf auth login`"
    try:
        headers = build_hf_headers(token=token)
        answer = httpx.get(f"{constants.ENDPOINT}/api/whoami-v2", headers=headers, timeout=HUB_S)
        if answer.status_code in (401, 403):
            return "the hub does not know the token; set HF_TOKEN to a valid one, or run `hf auth login`"
        who = answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        warn(f"`checkpoint.push_to_hub` ({repository}): the hub does not answer now: {type(error).__name__}: {error}")
        return ""
    names = [str(one.get("name")) for one in (who, *who.get("orgs", []))]
    if repository.partition("/")[0] not in names:
        return f"the token is that of {', '.join(names)}; give one of these as the owner, or another HF_TOKEN"
    if who.get("auth", {}).get("accessToken", {}).get("role") == "read":
        return "the token may only read; set HF_TOKEN to one that may write"
    return ""
