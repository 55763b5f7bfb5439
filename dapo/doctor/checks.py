"""Lists all checks in the order in which they are told, and makes one line of each.

In: a `Subject` and the machines of its run. Out: `Outcome`s, one per check; `dapo/doctor/README.md` is made of the
same list.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo.doctor.checked import cluster, files, inputs, judge, limits, planned, software, storage
from dapo.doctor.checked.allreduce import judged
from dapo.doctor.finding import FAULT, OK, SKIPPED, Finding, fault, worst
from dapo.doctor.machines import Machines, Silent, ThisMachine
from dapo.doctor.question import question
from dapo.doctor.subject import Subject

NODE, DRIVER, ALL = "every node", "driver", "all nodes"
MAX_NODES = 3  # of which a line tells


@dataclass(frozen=True, slots=True)
class Check:
    """Describes one check. where: `NODE` (look takes a `Question`), `DRIVER` (a `Subject`), or `ALL` (a `Subject` and
    the machines). text: what it looks at. needs: checks without whose success it cannot look. cheap: whether each run
    makes it too."""

    name: str
    where: str
    text: str
    look: Callable[..., Finding]
    needs: tuple[str, ...] = ()
    cheap: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds the line of one check. nodes: what each machine said, of checks that run on every node."""

    name: str
    finding: Finding
    seconds: float
    nodes: dict[str, Finding] = field(default_factory=dict)


def all_reduce(subject: Subject, machines: Machines) -> Finding:
    """Sums a tensor over all machines of the run."""
    device = "cuda" if subject.uses_gpus and machines.gpus() else "cpu"
    measured = machines.all_reduce(device)
    return judged(measured, device, len(machines.names), subject.cfg.plan.network_bandwidth)


CHECKS = (
    Check("python", NODE, "its version, the same as the driver's", software.python, cheap=True),
    Check("packages", NODE, "versions against `docker/*.lock`", software.packages),
    Check("libraries", NODE, "the build of vLLM; libnuma, where it computes on a CPU", software.libraries, cheap=True),
    Check("GPUs", NODE, "the driver's CUDA against torch's; memory that others hold", software.gpus),
    Check("allocator", NODE, "expandable segments, where engines open ranks' memory", software.allocator, cheap=True),
    Check("open files", NODE, "RLIMIT_NOFILE", limits.open_files, cheap=True),
    Check("processes", NODE, "RLIMIT_NPROC, and pids.max of a container", limits.processes, cheap=True),
    Check("shared memory", NODE, "size of /dev/shm", limits.shared_memory, cheap=True),
    Check("temporary disk", NODE, "room for Ray's session", limits.temporary_disk, cheap=True),
    Check("model", NODE, "local files whole and as the driver's, or the hub's cache, or the hub", files.models),
    Check("files", NODE, "reward functions, the rollout function and data can be read", files.data),
    Check("clock", ALL, "how far the nodes' clocks are apart", cluster.clocks),
    Check("free disk", DRIVER, "room for the planner's checkpoints", storage.free_disk, cheap=True),
    Check("disk speed", DRIVER, "the output directory takes files, and a checkpoint in time", storage.write_speed),
    Check("shared directory", ALL, "a token in the output directory, read and answered by every node", storage.shared),
    Check("authentication", DRIVER, "Ray's token: whoever reaches Ray's ports can run code", cluster.authentication),
    Check("placement", ALL, "GPUs that the run asks for, and that are there", cluster.placement, ("GPUs",)),
    Check("all-reduce", ALL, "gloo or NCCL over the whole allocation, with its bandwidth", all_reduce),
    Check("settings", DRIVER, "what a run tries first: schedule, model, functions on known answers", inputs.settings),
    Check("judge", DRIVER, "a judge with an address answers a question", judge.judges, cheap=True),
    Check("tokenizer", DRIVER, "it loads, reads text, and has an end of sequence", inputs.tokenizer, ("model",)),
    Check(
        "chat template", DRIVER, "shows what was asked, opens the model's turn; date", inputs.template, ("tokenizer",)
    ),
    Check("prompts", DRIVER, "rows that repeat or contradict each other", inputs.prompts, ("chat template",)),
    Check("held-out", DRIVER, "problems of `data.val_files` that are trained on", inputs.held_out, ("prompts",)),
    Check(
        "verifier", DRIVER, "reference answers: right for themselves, wrong for others", inputs.verifier, ("prompts",)
    ),
    Check("plan", DRIVER, "`python -m dapo.plan`, with the memory that is there", planned.verdict),
)


def diagnose(subject: Subject, machines: Machines, checks: Sequence[Check] = CHECKS) -> Iterator[Outcome]:
    """Yields an outcome per check, as soon as it is known."""
    driver = isinstance(machines, ThisMachine)
    asked = question(subject.cfg, joined=bool(subject.address), driver=driver, gpus=subject.uses_gpus)
    missing: set[str] = set()
    for check in checks:
        began, said = time.monotonic(), dict[str, Finding]()
        if blocked := [name for name in check.needs if name in missing]:
            finding = Finding(SKIPPED, f"not looked at, for want of `{'` and `'.join(blocked)}`")
        elif check.where == NODE:
            said = {name: _finding(answer) for name, answer in machines.ask_all(check.look, asked).items()}
            finding = _together(said)
        else:
            finding = _looked(check.look, (subject, machines) if check.where == ALL else (subject,))
        if finding.level in (FAULT, SKIPPED):
            missing.add(check.name)
        yield Outcome(check.name, finding, time.monotonic() - began, said)


def _looked(look: Callable[..., Finding], arguments: tuple[Any, ...]) -> Finding:
    try:
        return look(*arguments)
    except (ValueError, RuntimeError, OSError) as error:  # a sentence with the remedy
        return fault(str(error), "")
    except Exception as error:  # the other checks have something to say all the same
        return fault(f"the check failed: {type(error).__name__}: {error}", "")


def _finding(answer: Any) -> Finding:
    if isinstance(answer, Finding):
        return answer
    reason = answer.reason if isinstance(answer, Silent) else repr(answer)
    return fault(
        f"the check failed there: {reason}", "see that dapo is installed on this node as on the driver's, and Ray runs"
    )


def _together(said: dict[str, Finding]) -> Finding:
    """Makes one line of what the nodes say: the worst, with the names of those that say it."""
    if len(said) == 1:
        return next(iter(said.values()))
    level = worst([finding.level for finding in said.values()])
    those = {name: finding for name, finding in said.items() if finding.level == level}
    if level == OK:
        texts = list(dict.fromkeys(finding.found for finding in those.values()))
        return Finding(OK, f"{len(said)} nodes: {'; '.join(texts[:MAX_NODES])}")
    found = "; ".join(f"{name}: {finding.found}" for name, finding in [*those.items()][:MAX_NODES])
    more = f"; and {len(those) - MAX_NODES} nodes more" if len(those) > MAX_NODES else ""
    return Finding(level, f"on {len(those)} of {len(said)} nodes: {found}{more}", next(iter(those.values())).remedy)


def failed(outcomes: Sequence[Outcome]) -> bool:
    """Returns whether any is a fault."""
    return any(outcome.finding.level == FAULT for outcome in outcomes)
