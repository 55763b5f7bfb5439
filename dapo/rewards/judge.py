"""Scores a response with a judge model: queries an OpenAI-compatible endpoint and parses the score from its reply. The
response is adversarial and may try to influence the judge. Only the judge's reply is searched for the score, and only
the placeholders of the template are filled in."""

import asyncio
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from itertools import count
from typing import Any

import httpx

from dapo.rewards.calling.calls import Retry, servers
from dapo.rewards.calling.loading import OWN

RETRIED = (408, 409, 425, 429)  # and all from 500 on: server errors
TOO_LONG = (400, 413, 422)
AWAY = (429, 502, 503, 504)  # rate limit, gateway, starting server: the request was not processed
CONNECT_S = 10.0  # a lost node neither refuses nor accepts connections
_FIELD = re.compile(r"\{(prompt|response|ground_truth)\}")
_clients: dict[str, httpx.AsyncClient] = {}
_turn = count()


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    *,
    url: str,
    model: str,
    prompt: str,
    pattern: str,
    values: Mapping[str, float],
    lowest: float,
    highest: float,
    max_tokens: int,
    temperature: float,
    key_variable: str,
    prompt_cost: float,
    completion_cost: float,
) -> dict[str, float]:
    """Queries the judge once; the arguments after extra_info are the keys of `reward.judge`. Raises Retry if the server
    is busy or fails, or the reply has no score; ValueError if the server rejects the request."""
    fields = {"prompt": (extra_info or {}).get("prompt", ""), "response": solution_str, "ground_truth": ground_truth}
    text = _FIELD.sub(lambda field: fields[field[1]], prompt)
    base, secret = _own() if url == OWN else (url, os.environ[key_variable].strip() if key_variable else "")
    response = await _client(base, proxies=url != OWN).post(
        f"{base.rstrip('/')}/chat/completions",
        headers={"Authorization": f"Bearer {secret}"} if secret else {},
        json={
            "model": model,
            "messages": [{"role": "user", "content": text.encode("utf-8", "replace").decode()}],
            "max_tokens": max_tokens,
            "temperature": temperature,
        },
    )
    reply, usage = _read(response)
    try:
        score = read_score(reply, pattern, values, lowest, highest)
    except Retry as error:
        raise Retry(str(error), alike=temperature == 0) from None
    prompt_tokens, completion_tokens = (float(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion"))
    return {
        "score": score,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "cost": (prompt_tokens * prompt_cost + completion_tokens * completion_cost) / 1e6,
    }


async def ask_once(kwargs: Mapping[str, Any], limit_s: float) -> float:
    """Scores a correct answer to a simple sum within `limit_s`, to test the judge. Raises as `compute_score` does,
    TimeoutError, and httpx errors."""
    try:
        async with asyncio.timeout(limit_s):
            given = await compute_score("doctor", "Answer: 4", "4", {"prompt": "What is 2 + 2?"}, **kwargs)
        return given["score"]
    finally:
        if client := _clients.pop(kwargs["url"], None):
            await client.aclose()


def problems(kwargs: Mapping[str, Any]) -> Iterator[str]:
    if kwargs["url"] != OWN and not str(kwargs["url"]).startswith(("http://", "https://")):
        yield (
            f"`reward.judge.url` ({kwargs['url']!r}) must be an address such as http://HOST:8000/v1; or give the model "
            "of a judge that the run starts itself, `reward.judge.engine.path`"
        )
    if not kwargs["model"]:
        yield "`reward.judge.model` is empty; give the name under which the endpoint serves the judge"
    if "{response}" not in kwargs["prompt"]:
        yield "`reward.judge.prompt` has no {response}; say where the judge reads it"
    try:
        if re.compile(kwargs["pattern"]).groups < 1:
            yield f"`reward.judge.pattern` ({kwargs['pattern']!r}) must have a group around the score"
    except re.error as error:
        yield f"`reward.judge.pattern` ({kwargs['pattern']!r}) is no regular expression ({error})"
    if not kwargs["lowest"] < kwargs["highest"]:
        yield (
            f"`reward.judge.lowest` ({kwargs['lowest']:g}) must be below `reward.judge.highest` ({kwargs['highest']:g})"
        )
    for text, value in kwargs["values"].items():
        if not kwargs["lowest"] <= value <= kwargs["highest"]:
            yield (
                f"`reward.judge.values.{text}` ({value:g}) is outside of `reward.judge.lowest` to "
                f"`reward.judge.highest` ({kwargs['lowest']:g} to {kwargs['highest']:g}), and would be asked for "
                "again; widen them"
            )
    key = os.environ.get(kwargs["key_variable"], "").strip()
    if kwargs["key_variable"] and not (key and key.isascii() and key.isprintable()):
        what = "holds a character that no header may" if key else "is not set"
        yield (
            f"`reward.judge.key_variable` names {kwargs['key_variable']}, which {what}; export the key in it here and "
            "on every node, or leave `reward.judge.key_variable` empty"
        )


def read_score(reply: str, pattern: str, values: Mapping[str, float], lowest: float, highest: float) -> float:
    """Returns the score in a reply: the first group of the pattern's last match, looked up in `values` if there are
    any, else as a number. Raises Retry if there is none, or if it is outside lowest..highest."""
    found = [match[1] for match in _compiled(pattern).finditer(reply) if match[1] is not None]
    if not found:
        raise Retry("the judge's reply has no score")
    text = found[-1].strip()
    try:
        score = float(values[text] if values else text)
    except (KeyError, ValueError):
        raise Retry("the judge's reply has another score than `reward.judge.values` or a number") from None
    if not lowest <= score <= highest:
        raise Retry(f"the judge's score is outside of {lowest:g}..{highest:g}")
    return score


def retry_after_s(header: str) -> float:
    """Returns the seconds of a Retry-After header, given as seconds or as a date; 0 for anything else."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def _read(response: httpx.Response) -> tuple[str, Mapping[str, Any]]:
    """Returns the reply's text and its token usage. The server's text is never logged."""
    status = response.status_code
    if status in RETRIED or status >= 500:
        after_s = retry_after_s(response.headers.get("retry-after", ""))
        raise Retry(f"the judge's server answered {status}", after_s, away=status in AWAY)
    if status in TOO_LONG:
        raise ValueError(
            f"the judge's server refused the request ({status}): the response may be too long for its context, or "
            "`reward.judge.max_tokens` for what is left of it"
        )
    if status != 200:
        raise ValueError(
            f"the judge's server answered {status}: check `reward.judge.url`, `reward.judge.model` and the key in "
            "`reward.judge.key_variable`"
        )
    try:
        body = response.json()
        # None: `max_tokens` was reached during reasoning.
        reply, usage = body["choices"][0]["message"]["content"] or "", body.get("usage") or {}
        if isinstance(reply, str) and isinstance(usage, dict):
            return reply, usage
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        pass
    raise Retry("the judge's server answered with something else than a chat completion")


def _own() -> tuple[str, str]:
    """Returns URL and key of the run's next judge server (round robin), so that a retry goes to another one."""
    there = servers.get()
    if not there:
        raise Retry("no judge of the run's own serves")
    one = there[next(_turn) % len(there)]
    return one["url"], one["key"]


def _client(url: str, *, proxies: bool) -> httpx.AsyncClient:
    """Returns this process's client for a server; only connecting has a timeout. proxies: whether to use the
    environment's."""
    if url not in _clients:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        _clients[url] = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=proxies)
    return _clients[url]


@lru_cache(maxsize=8)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
