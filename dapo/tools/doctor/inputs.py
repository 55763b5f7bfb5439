"""Checks of what a run is given, on the driver: what the run itself tries before it starts workers, an answer of each
judge, its data, and its plan with the memory that is there."""

import asyncio
import copy
from collections.abc import Iterator, Mapping, Sequence
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
from dapo.tools.doctor.software import Gpu, visible_gpus
from dapo.tools.doctor.subject import Finding, Subject, fault, ok, warning, worst
from dapo.tools.plan.__main__ import refusals, unpredictable
from dapo.tools.plan.actor import ActorMemory
from dapo.tools.plan.fit import changed, problems
from dapo.tools.plan.terms import size

REACH = (
    "start it, or correct `reward.judge.url`, `reward.judge.model` and the key in `reward.judge.key_variable`; every "
    "node must reach it"
)
MEMORY, HOST = "plan.gpu_memory_bytes", "plan.host_memory_bytes"
WATCH = "watch the memory of the first steps"
HIDDEN = 0.03  # share of a device's memory that its driver reserves: an 80 GB one shows 79.6


def settings(subject: Subject) -> Finding:
    """Runs `dapo.driver.preflight`: schedule, model, functions and their known answers, sinks."""
    from dapo.driver.preflight import preflight, rewards_tried  # imports torch

    preflight(subject.cfg)
    if lines := [*rewards_tried(subject.cfg)]:
        say = fault if any(fails for fails, _ in lines) else warning
        return say("\n".join(line for _, line in lines), "")
    names = ", ".join(ready_name(spec.path) or spec.path for spec in subject.cfg.reward.functions)
    return ok(f"schedule {subject.cfg.actor.optim.lr_scheduler}, reward functions {names}")


def data(subject: Subject) -> Finding:
    """Loads tokenizer and data as the run does; what it would warn of is a warning."""
    from dapo.driver.run import load_data, make_paths_absolute  # imports Ray and torch

    cfg, said = copy.deepcopy(subject.cfg), list[str]()
    make_paths_absolute(cfg)
    with redirect_stdout(StringIO()) as told, redirect_stderr(StringIO()), hearing_warnings(said.append):
        prompts, held_out, _ = load_data(cfg)
    found = "; ".join(told.getvalue().splitlines())
    if said:
        return warning(f"{found}; {'; '.join(said)}", "correct the data or the tokenizer if that is not meant")
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return ok(f"{found}; the longest of {longest} tokens; {len(held_out)} held-out sets")


def judges(subject: Subject) -> Finding:
    """Asks each judge that the run does not start itself for one short reply. Without a working judge, responses would
    be unscorable for hours. The check `settings` covers its other keys."""
    limit_s = subject.cfg.reward.remote.call_timeout_s
    found = [asyncio.run(_asked(kwargs, limit_s)) for kwargs in _judges_of(subject)]
    if not found:
        return ok("no judge with an address of its own is asked")
    level = worst([one.level for one in found])
    return next(one for one in found if one.level == level)


def _judges_of(subject: Subject) -> Iterator[Mapping[str, Any]]:
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
        return fault(f"{where} gave no answer within {limit_s:g} s (`reward.remote.call_timeout_s`)", REACH)
    except Retry as error:
        return warning(f"{where} gave no score, and responses would be asked about again: {error}", REACH)
    except (ValueError, OSError, httpx.HTTPError) as error:
        return fault(f"{where} cannot be asked: {describe(error)}", REACH)
    return ok(f"{where} answers: it gave a right sum {score:g}")


def plan(subject: Subject) -> Finding:
    cfg, shape = subject.cfg, subject.shape
    if shape is None:
        return warning(
            f"the planner does not know the architecture of `model.path` ({cfg.model.path})",
            WATCH,
        )
    if cfg.trainer.only != "both":
        return warning("the planner knows whole runs alone", WATCH)
    refused = refusals(cfg)
    if not refused and (unknown := [*unpredictable(cfg)]):
        return warning(unknown[0], WATCH)
    if found := refused or problems(cfg, shape):
        return fault(found[0], f"and {len(found) - 1} more: `python -m dapo.plan`" if found[1:] else "")
    devices = visible_gpus() if subject.uses_gpus else []
    there, assumed = _memory(subject, devices), cfg.plan.gpu_memory_bytes
    if there is not None and there < (1 - HIDDEN) * assumed:
        if found := problems(changed(cfg, {MEMORY: there}), shape):
            return fault(f"with the {size(there)} that are there: {found[0]}", "")
    if devices:
        cfg = changed(cfg, {HOST: memory_bytes()})
        if found := problems(cfg, shape):
            return fault(f"with the host memory that is there: {found[0]}", "")
    peak = ActorMemory(cfg, shape).peak()
    what = "GPU" if subject.uses_gpus else "machine"
    measured = "" if there is None else f"; this {what} has {size(there)}"
    return ok(f"fits in {size(assumed)} (`{MEMORY}`): a rank's peak is {size(peak.total)}{measured}")


def _memory(subject: Subject, devices: Sequence[Gpu]) -> float | None:
    """Returns the bytes of this machine's smallest GPU, or of the machine for a CPU run; None if unknown."""
    if subject.uses_gpus:
        return min((gpu.total for gpu in devices if gpu.total is not None), default=None)
    return float(memory_bytes())
