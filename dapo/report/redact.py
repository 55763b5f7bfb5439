"""Takes secrets out of what is stored or shown: by the names of keys, out of addresses, and those of the environment.

In: plain containers, or a text. Out: the same with `HIDDEN` in place of each secret. Keys of dapo hold none; engine
arguments of vLLM, arguments of reward functions and of `wandb.init`, and addresses of data may.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(redacted)"
SHORTEST = 8  # characters of a secret that is looked for in a text: shorter ones stand in many by chance

# A name that ends in `token`; max_tokens and tokenizer are no secrets.
_SECRET = re.compile(
    r"""passw(?:or)?d | passphrase | secret | credential | authorization | bearer | cookie
    | (?:api|access|private|signing|encryption|account)[_.-]?key | (?:token|(?:^|[_.-])(?:auth|pat|pwd))$""",
    re.VERBOSE | re.IGNORECASE,
)
_SPECIAL = re.compile(r"(?i)(?:^|[_.-])(?:bos|eos|pad|unk|sep|cls|mask|image|start|stop|end|per)[_.-]?token$")
_LOGIN = re.compile(r"(?<=://)[^/?#@\s'\"]+@")
_SIGNED = re.compile(r"(?i)(?<=[?&])([\w.-]*(?:token|signature|sig|secret|password|credential|key))=[^&#\s'\"]+")


def is_secret(name: str) -> bool:
    """Returns whether the name of a key says that its value is for nobody else."""
    return bool(_SECRET.search(name)) and not _SPECIAL.search(name)


def redacted(tree: Any, name: str = "") -> Any:
    """Returns containers with the same keys: a value under a secret name is `HIDDEN`, whatever it holds, and texts are
    as by `without_logins`. name: of the key that `tree` is under."""
    if is_secret(name) and tree not in (None, "", False, True):
        return HIDDEN
    if isinstance(tree, Mapping):
        return {key: redacted(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [redacted(value, name) for value in tree]
    return without_logins(tree) if isinstance(tree, str) else tree


def without_logins(text: str) -> str:
    """Returns a text whose addresses say neither who logs in (`user:password@`) nor what signs them (`?token=`)."""
    if "://" not in text:
        return text
    return _SIGNED.sub(rf"\1={HIDDEN}", _LOGIN.sub(f"{HIDDEN}@", text))


def without_secrets(text: str, variables: Mapping[str, str] = os.environ) -> str:
    """Returns a text, such as an error that quotes a request, without the values of environment variables whose names
    say that they are secret, and as by `without_logins`. What is a path here (PWD) is none."""
    there = [name for name in list(variables) if is_secret(name)]  # a copy: another thread may set some
    values = {variables.get(name, "").strip() for name in there}
    for value in sorted(values, key=len, reverse=True):  # one may be a part of another
        if len(value) >= SHORTEST and value in text and not os.path.exists(value):
            text = text.replace(value, HIDDEN)
    return without_logins(text)
