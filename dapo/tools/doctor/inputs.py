"""Checks of what a run is given, on the driver: what the run itself tries before it starts workers, an answer of each
judge, its data, and its plan with the memory that is there."""

import asyncio
import copy
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import httpx

from dapo.config.reward_functions import ready_name, source_functions
from dapo.ground.console import hearing_warnings
from dapo.ground.redact import without_secrets
from dapo.ground.user_code import describe
from dapo.rewards import judge
from dapo.rewards.calling.calls import Retry
from dapo.rewards.calling.loading import OWN, with_judge
from dapo.tools.doctor.limits import memory_bytes
from dapo.tools.doctor.software import visible_gpus
from dapo.tools.doctor.subject import LEVELS, Finding, Subject, fault, ok, warning
from dapo.tools.plan.__main__ import refusals, unpredictable
from dapo.tools.plan.fit import changed, problems
from dapo.tools.plan.terms import size

REACH = "start it, or correct `reward.judge.url`, `reward.judge.model` and the key in `reward.judge.key_variable`"
HIDDEN = 0.03  # share of a device's memory that its driver reserves: an 80 GB one shows 79.6


def settings(subject: Subject) -> Finding:
    """Runs `dapo.driver.preflight`: schedule, model, functions and their known answers, sinks."""
    from dapo.driver.preflight import preflight  # imports torch
    from dapo.rewards.trial import tried

    preflight(subject.cfg)
    lines, doubts, errors = tried(subject.cfg)
    found = "\n".join([*lines, *doubts, *errors])
    if doubts or errors:
        return fault(found, "") if errors else warning(found, "")
    return ok("\n".join(["schedule, model, functions and their known answers", *lines]))


def data(subject: Subject) -> Finding:
    """Loads tokenizer and data as the run does; what it would warn of is a warning."""
    from dapo.driver.run import load_data, make_paths_absolute  # imports Ray and torch

    cfg, said = copy.deepcopy(subject.cfg), list[str]()
    make_paths_absolute(cfg)
    with redirect_stdout(StringIO()) as told, redirect_stderr(StringIO()), hearing_warnings(said.append):
        load_data(cfg)
    found = "; ".join(told.getvalue().splitlines())
    if said:
        return warning(f"{found}; {'; '.join(said)}", "correct the data or the tokenizer if that is not meant")
    return ok(found)


def judges(subject: Subject) -> Finding:
    """Asks each judge that the run does not start itself for one short reply: without it, responses would be unscorable
    for hours. The check `settings` covers its other keys."""
    cfg, asked = subject.cfg, dict[tuple[str, str], Mapping[str, Any]]()
    for specs in (cfg.reward.functions, *source_functions(cfg.data.sources).values()):
        for spec in with_judge(specs, cfg.reward.judge):
            if ready_name(spec.path) == "judge" and spec.kwargs["url"] != OWN and not any(judge.problems(spec.kwargs)):
                asked[spec.kwargs["url"], spec.kwargs["model"]] = spec.kwargs
    found = [asyncio.run(_asked(kwargs, cfg.reward.remote.call_timeout_s)) for kwargs in asked.values()]
    nothing = ok("no judge with an address of its own is asked")
    return max(found, key=lambda finding: LEVELS.index(finding.level), default=nothing)


async def _asked(kwargs: Mapping[str, Any], limit_s: float) -> Finding:
    where = f"the judge at {without_secrets(kwargs['url'])}"
    try:
        score = await judge.ask_once(kwargs, limit_s)
    except TimeoutError:
        return fault(f"{where} gave no answer within {limit_s:g} s (`reward.remote.call_timeout_s`)", REACH)
    except Retry as error:
        return warning(f"{where} gave no score: {error}", REACH)
    except (ValueError, OSError, httpx.HTTPError) as error:
        return fault(f"{where} cannot be asked: {describe(error)}", REACH)
    return ok(f"{where} answers: it gave a right sum {score:g}")


def plan(subject: Subject) -> Finding:
    """Plans with the memory of the smallest GPU and of the host, where these are known and less than is assumed."""
    cfg, shape = subject.cfg, subject.shape
    if shape is None or cfg.trainer.only != "both":
        return warning("the planner knows whole runs of common architectures", "watch the memory of the first steps")
    if refused := refusals(cfg):
        return fault(refused[0], "")
    if unknown := [*unpredictable(cfg)]:
        return warning(unknown[0], "watch the memory of the first steps")
    devices = visible_gpus() if subject.uses_gpus else []
    known = [gpu.total for gpu in devices if gpu.total is not None] if subject.uses_gpus else [float(memory_bytes())]
    there = min(
        [cfg.plan.gpu_memory_bytes, *(total for total in known if total < (1 - HIDDEN) * cfg.plan.gpu_memory_bytes)]
    )
    cfg = changed(cfg, {"plan.gpu_memory_bytes": there})
    if devices:  # else the driver is a head without GPUs, and may have less memory
        cfg = changed(cfg, {"plan.host_memory_bytes": memory_bytes()})
    if found := problems(cfg, shape):
        return fault(f"with {size(there)}: {found[0]}", "see `python -m dapo.plan`")
    return ok(f"fits in {size(there)}")
