"""Removes secrets from what is stored or shown. Secrets are recognized by key names, by their shape, in addresses and
command lines, and by value if they are in the environment; each is replaced by `HIDDEN`. Keys of dapo hold none, but
engine arguments of vLLM, arguments of reward functions and of `wandb.init`, and data addresses may."""

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(redacted)"
SHORTEST = 8  # characters; shorter secrets would match text by chance

_SECRET = re.compile(
    r"""passw(?:or)?d | pass(?:phrase|code|key) | secret | credential | authorization | bearer | cookie | jwt | webhook
    | service[_.-]?account | connection[_.-]?string | (?:api|access|private|signing|encryption|account|ssh)[_.-]?key
    | (?:^|[_.-])(?:auth|pat|pwd|pw|pass|creds?|dsn)$""",
    re.VERBOSE | re.IGNORECASE,
)
# A token or some key; `key` alone and most plurals `tokens` are ordinary data.
_PERHAPS = re.compile(
    r"""token$ | (?<=[a-z0-9])[_-]?key$ | (?:^|[.])tokens$
    | (?: api | access | o?auth | bearer | bot | refresh | session | user | client | login | service | hf | hub | github
        | gitlab | slack | wandb | openai )[_-]?tokens$""",
    re.VERBOSE | re.IGNORECASE,
)
_PLAIN = re.compile(
    r"""(?:^|[_.-]|(?<=[a-z])(?-i:(?=[A-Z])))
    (?: (?: bos | eos | pad | unk | sep | cls | mask | image | video | audio | vision | start | begin | stop | end | per
          | special | think )[_.-]?token
      | (?: prompt | response | completion | answer | solution | question | messages? | chat | text | label | truth
          | target | image | video | audio | media | tools? | reward | fn | info | model | metric | score | weight
          | monitor | data | column | field | feature | row | item | id | index | name | source | input | output
          | config | sort | group | join | primary | foreign | public | pub | cache | hash | dict | map | lookup
          | search | split | batch | state | param | past | query | value | mon | don | tur | hot )[_-]?key )$""",
    re.VERBOSE | re.IGNORECASE,
)

# Secrets by shape: private keys, service tokens with a known prefix, JSON web tokens, headers, webhooks.
_SHAPES = re.compile(
    r"""-----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | (?<![A-Za-z0-9_-])(?: hf_[A-Za-z0-9]{16,} | (?:api_org|nvapi|glpat|npm|pypi|gsk)[_-][A-Za-z0-9-]{16,}
      | sk-[\w-]{16,} | [rsp]k_(?:live|test)_\w{16,} | gh[opsur]_[A-Za-z0-9]{16,} | github_pat_\w{16,}
      | xox[a-z]-[\w-]{10,} | (?:AKIA|ASIA)[A-Z0-9]{16} | AIza[\w-]{30,} | ya29\.[\w-]{16,}
      | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]* )
    | (?<=\b[Bb]earer\ )[\w.~+/=-]{8,}
    | (?<=://hooks\.slack\.com/)[^\s'"]+ | (?<=://discord\.com/api/webhooks/)[^\s'"]+
    | (?<=://discordapp\.com/api/webhooks/)[^\s'"]+ | (?<=\.webhook\.office\.com/)[^\s'"]+
    | (?<=://api\.telegram\.org/bot)[^\s'"/]+""",
    re.VERBOSE | re.DOTALL,
)
_LOGIN = re.compile(r"(?<=://)[^/?#\s'\"]+@")
_PARAMETER = re.compile(r"(?<=[?&#])([\w.-]+=)([^&#\s'\"]+)")
_SIGNS = re.compile(r"(?i)(?:token|signature|sig|hmac|key|access)=$")  # of an address, besides secret names
# A value after its name: NAME=VALUE, "NAME": "VALUE", a_name: VALUE, --name VALUE.
_NAMED = re.compile(
    r"""(?<![\w.?&\#-])(-{0,2}[A-Za-z_][\w.-]*(?:=|['"]\s*:\s*|:\s+(?:(?:Basic|Bearer|Token)\s+)?+)
      | (?<!\S)--[A-Za-z][\w.-]*\s+)
    ("[^"\n]+"|'[^'\n]+'|[^\s'",;)}\]\[{(-][^\s'",;)}\]]*)""",
    re.VERBOSE,
)
_COLON = re.compile(r"(?i)passw(?:or)?d|passphrase|authorization|apikey|accesstoken")  # `unexpected token: x` is prose
_SHORT = re.compile(r"[\d.]{1,7}|None|null|True|False|true|false")


def is_secret(name: str) -> bool:
    return bool(_SECRET.search(name) or _PERHAPS.search(name) and not _PLAIN.search(name))


def redacted(tree: Any, name: str = "") -> Any:
    """Returns containers with the same keys and without secrets. name: the key of `tree`. Any value under a secret
    name, or after such an option of a command line, becomes `HIDDEN`; texts go through `without_logins`."""
    if is_secret(name) and tree not in (None, "", False, True) and not _counts(tree, name):
        return HIDDEN
    if isinstance(tree, Mapping):
        return {key: redacted(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [
            HIDDEN if _is_option(before) and isinstance(value, str) and value[:1] != "-" else redacted(value, name)
            for before, value in zip(["", *tree], tree, strict=False)
        ]
    return without_logins(tree) if isinstance(tree, str) else tree


def _counts(tree: Any, name: str) -> bool:
    """Whether a value named `...tokens` is numeric: token counts or token ids."""
    return name.lower().endswith("tokens") and all(
        isinstance(one, int | float) for one in (tree if isinstance(tree, list | tuple) else [tree])
    )


def _is_option(word: Any) -> bool:
    return isinstance(word, str) and word.startswith("--") and "=" not in word and is_secret(word)


def without_logins(text: str) -> str:
    """Removes secrets by shape (`hf_...`), values after secret names (`password=`, `--token`), and logins
    (`user:password@`) and signatures (`?sig=`) in addresses."""
    text = _SHAPES.sub(HIDDEN, text)
    if "://" in text:
        text = _PARAMETER.sub(_without_parameter, _LOGIN.sub(f"{HIDDEN}@", text))
    return _NAMED.sub(_without_value, text)


def _without_parameter(found: re.Match[str]) -> str:
    return f"{found[1]}{HIDDEN}" if _SIGNS.search(found[1]) or is_secret(found[1][:-1]) else found[0]


def _without_value(found: re.Match[str]) -> str:
    name = re.split(r"[\s=:'\"]", found[1], maxsplit=1)[0]
    in_prose = found[1][len(name)] == ":" and name.isalpha() and not _COLON.fullmatch(name)
    if not is_secret(name) or in_prose or _SHORT.fullmatch(found[2]):
        return found[0]
    quote = found[2][0] if found[2][0] in "'\"" else ""
    return f"{found[1]}{quote}{HIDDEN}{quote}"


def without_secrets(text: str, variables: Mapping[str, str] = os.environ) -> str:
    """Does `without_logins`, and removes the values of environment variables with secret names, e.g. from a quoted
    request. A value that is an existing path (PWD) is not a secret."""
    there = [name for name in list(variables) if is_secret(name)]  # a copy: another thread may set some
    values = {variables.get(name, "").strip() for name in there}
    for value in sorted(values, key=len, reverse=True):  # one may be a part of another
        if len(value) >= SHORTEST and value in text and not os.path.exists(value):
            text = text.replace(value, HIDDEN)
    return without_logins(text)
