"""All checks in reporting order; runs them, and merges the nodes' findings."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo.config.schema import Config
from dapo.tools.doctor import inputs, limits, network, software, storage
from dapo.tools.doctor.machines import Machines, Silent, ThisMachine, authentication, clocks, placement
from dapo.tools.doctor.subject import FAULT, OK, SKIPPED, WARNING, Finding, Subject, fault, question, worst

NODE, DRIVER, ALL = "every node", "driver", "all nodes"
MAX_NODES = 3  # named in one line


@dataclass(frozen=True, slots=True)
class Check:
    """One check. where: `NODE` (look takes a `Question`), `DRIVER` (a `Subject`), or `ALL` (a `Subject` and the
    machines). needs: checks that must succeed first. cheap: whether each run makes it too."""

    name: str
    where: str
    look: Callable[..., Finding]
    needs: tuple[str, ...] = ()
    cheap: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one check. nodes: the finding of each machine, for checks that run on every node."""

    name: str
    finding: Finding
    seconds: float
    nodes: dict[str, Finding] = field(default_factory=dict)


def all_reduce(subject: Subject, machines: Machines) -> Finding:
    device = "cuda" if subject.uses_gpus and machines.gpus() else "cpu"
    count = machines.having_gpus() if device == "cuda" else len(machines.names)
    return network.judged(machines.all_reduce(device), device, count, subject.cfg.plan.network_bandwidth)


CHECKS = (  # described in README.md
    Check("python", NODE, software.python, cheap=True),
    Check("packages", NODE, software.packages),
    Check("libraries", NODE, software.libraries, cheap=True),
    Check("GPUs", NODE, software.gpus, cheap=True),
    Check("allocator", NODE, software.allocator, cheap=True),
    Check("RDMA", NODE, network.rdma),
    Check("open files", NODE, limits.open_files, cheap=True),
    Check("processes", NODE, limits.processes, cheap=True),
    Check("shared memory", NODE, limits.shared_memory, cheap=True),
    Check("temporary disk", NODE, limits.temporary_disk, cheap=True),
    Check("model", NODE, storage.models),
    Check("files", NODE, storage.functions),
    Check("clock", ALL, clocks),
    Check("free disk", DRIVER, storage.free_disk, cheap=True),
    Check("disk speed", DRIVER, storage.write_speed),
    Check("shared directory", ALL, storage.shared),
    Check("authentication", DRIVER, authentication),
    Check("placement", ALL, placement, ("GPUs",)),
    Check("all-reduce", ALL, all_reduce),
    Check("settings", DRIVER, inputs.settings),
    Check("judge", DRIVER, inputs.judges, cheap=True),
    Check("data", DRIVER, inputs.data),
    Check("plan", DRIVER, inputs.plan),
)


def check_machine(cfg: Config, warn: Callable[[str], None]) -> None:
    """Runs the cheap checks on the driver at the start of each run, before any worker starts. Raises ValueError with
    one line per fault. warn: called with one line per warning."""
    faults = []
    for outcome in diagnose(Subject(cfg), ThisMachine(), [check for check in CHECKS if check.cheap]):
        line = f"{outcome.name}: {outcome.finding.found}; {outcome.finding.remedy}"
        if outcome.finding.level == FAULT:
            faults.append(line)
        elif outcome.finding.level == WARNING:
            warn(line)
    if faults:
        raise ValueError("\n".join([*faults, "(trainer.preflight=false starts the run all the same)"]))


def diagnose(subject: Subject, machines: Machines, checks: Sequence[Check] = CHECKS) -> Iterator[Outcome]:
    driver, gpus = isinstance(machines, ThisMachine), subject.uses_gpus
    everywhere = 0 if driver else machines.gpus()
    asked = question(subject.cfg, joined=bool(subject.address), driver=driver, gpus=gpus, cluster_gpus=everywhere)
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
    except (ValueError, RuntimeError, OSError) as error:  # the message includes the remedy
        return fault(str(error), "")
    except Exception as error:  # the other checks still run
        return fault(f"the check failed: {type(error).__name__}: {error}", "")


def _finding(answer: Any) -> Finding:
    if isinstance(answer, Finding):
        return answer
    reason = answer if isinstance(answer, Silent) else repr(answer)
    return fault(
        f"the check failed there: {reason}", "see that dapo is installed on this node as on the driver's, and Ray runs"
    )


def _together(said: dict[str, Finding]) -> Finding:
    """Merges the nodes' findings into the worst, with the names of its nodes."""
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
