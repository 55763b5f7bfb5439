"""Asks each judge that the run does not start itself for one short reply, from the driver. Without a working judge,
responses would be unscorable for hours."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from dapo.doctor.finding import Finding, fault, ok, warning, worst
from dapo.doctor.subject import Subject
from dapo.report.redact import without_secrets
from dapo.rewards import judge
from dapo.rewards.calling.by_entry import source_functions
from dapo.rewards.calling.calls import Retry
from dapo.rewards.calling.loading import OWN, describe, ready_name, with_judge

REMEDY = (
    "start it, or correct `reward.judge.url`, `reward.judge.model` and the key in `reward.judge.key_variable`; every "
    "node must reach it"
)


def judges(subject: Subject) -> Finding:
    """Asks each judge once. The check `settings` covers its other keys."""
    limit_s = subject.cfg.reward.remote.call_timeout_s
    found = [asyncio.run(_asked(kwargs, limit_s)) for kwargs in _asked_of(subject)]
    if not found:
        return ok("no judge with an address of its own is asked")
    level = worst([one.level for one in found])
    return next(one for one in found if one.level == level)


def _asked_of(subject: Subject) -> Iterator[Mapping[str, Any]]:
    cfg, seen = subject.cfg, set()
    for specs in (cfg.reward.functions, *source_functions(cfg.data.sources).values()):
        for spec in with_judge(specs, cfg.reward.judge):
            if ready_name(spec.path) != "judge" or spec.kwargs["url"] == OWN or any(judge.problems(spec.kwargs)):
                continue
            if (one := (spec.kwargs["url"], spec.kwargs["model"])) not in seen:
                seen.add(one)
                yield spec.kwargs


async def _asked(kwargs: Mapping[str, Any], limit_s: float) -> Finding:
    where = f"the judge at {without_secrets(kwargs['url'])}"
    try:
        score = await judge.ask_once(kwargs, limit_s)
    except TimeoutError:
        return fault(f"{where} gave no answer within {limit_s:g} s (`reward.remote.call_timeout_s`)", REMEDY)
    except Retry as error:
        return warning(f"{where} gave no score, and responses would be asked about again: {error}", REMEDY)
    except (ValueError, OSError, httpx.HTTPError) as error:
        return fault(f"{where} cannot be asked: {describe(error)}", REMEDY)
    return ok(f"{where} answers: it gave a right sum {score:g}")
