"""Asks the planner whether the run fits, first with the assumed memory, then with the actual memory."""

from collections.abc import Sequence

from dapo.doctor.checked.devices import Gpu, visible_gpus
from dapo.doctor.checked.limits import memory_bytes
from dapo.doctor.finding import Finding, fault, ok, warning
from dapo.doctor.subject import Subject
from dapo.plan.__main__ import refusals, unpredictable
from dapo.plan.actor import ActorMemory
from dapo.plan.fit import beyond_host, changed, problems
from dapo.plan.terms import size

MEMORY, HOST = "plan.gpu_memory_bytes", "plan.host_memory_bytes"
WATCH = "watch the memory of the first steps"
HIDDEN = 0.03  # share of a device's memory that its driver reserves: an 80 GB one shows 79.6


def verdict(subject: Subject) -> Finding:
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
    if short := beyond_host(cfg, shape):
        return warning(short, WATCH)
    peak = ActorMemory(cfg, shape).peak()
    what = "GPU" if subject.uses_gpus else "machine"
    measured = "" if there is None else f"; this {what} has {size(there)}"
    return ok(f"fits in {size(assumed)} (`{MEMORY}`): a rank's peak is {size(peak.total)}{measured}")


def _memory(subject: Subject, devices: Sequence[Gpu]) -> float | None:
    """Returns the bytes of this machine's smallest GPU, or of the machine for a CPU run; None if unknown."""
    if subject.uses_gpus:
        return min((gpu.total for gpu in devices if gpu.total is not None), default=None)
    return float(memory_bytes())
