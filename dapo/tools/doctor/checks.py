"""All checks in reporting order; runs them, and merges the nodes' findings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.config.schema import Config
from dapo.tools.doctor import inputs, limits, network, software, storage
from dapo.tools.doctor.machines import Silent, ThisMachine, authentication, clocks
from dapo.tools.doctor.subject import FAULT, LEVELS, WARNING, Finding, Subject, fault, ok, question, warning

NODE, DRIVER, ALL = "every node", "driver", "all nodes"
MAX_NODES = 3  # named in one line


@dataclass(frozen=True, slots=True)
class Check:
    """One check. where: `NODE` (look takes a `Question`), `DRIVER` (a `Subject`), or `ALL` (a `Subject` and the
    machines). cheap: whether each run makes it too."""

    name: str
    where: str
    look: Callable[..., Finding]
    cheap: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    finding: Finding


def placement(subject: Subject, machines: ThisMachine) -> Finding:
    if not subject.uses_gpus:
        return ok("no GPU asked for")
    from dapo.tools.doctor.nodes import fitting  # imports Ray

    try:
        return ok(fitting(subject.cfg, machines))
    except ValueError as error:
        if limit := subject.cfg.trainer.nodes_timeout_s:
            return warning(str(error), f"the run waits for more nodes for {limit:g} s (`trainer.nodes_timeout_s`)")
        return fault(str(error), "")


def parity(subject: Subject) -> Finding:
    """Starts an engine and an actor rank, and compares them token by token."""
    from dapo.tools.doctor.parity import look  # imports Ray and torch

    return look(subject)


PARITY = Check("parity", DRIVER, parity)  # only with --parity: it loads the model twice
CHECKS = (  # described in README.md
    Check("packages", NODE, software.packages),
    Check("GPUs", NODE, software.gpus, cheap=True),
    Check("RDMA", NODE, network.rdma),
    Check("open files", NODE, limits.open_files, cheap=True),
    Check("processes", NODE, limits.processes, cheap=True),
    Check("shared memory", NODE, limits.shared_memory, cheap=True),
    Check("temporary disk", NODE, limits.temporary_disk, cheap=True),
    Check("files", NODE, storage.files),
    Check("clock", ALL, clocks),
    Check("free disk", DRIVER, storage.free_disk, cheap=True),
    Check("disk speed", DRIVER, storage.write_speed),
    Check("shared directory", ALL, storage.shared),
    Check("authentication", DRIVER, authentication),
    Check("placement", ALL, placement),
    Check("all-reduce", ALL, network.all_reduce),
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


def diagnose(subject: Subject, machines: ThisMachine, checks: Sequence[Check] = CHECKS) -> Iterator[Outcome]:
    driver = type(machines) is ThisMachine
    asked = question(
        subject.cfg,
        joined=bool(subject.address),
        driver=driver,
        gpus=subject.uses_gpus,
        cluster_gpus=0 if driver else machines.gpus(),
    )
    for check in checks:
        if check.where == NODE:
            finding = _worst(machines.ask_all(check.look, asked))
        else:
            finding = _looked(check.look, (subject, machines) if check.where == ALL else (subject,))
        yield Outcome(check.name, finding)


def _looked(look: Callable[..., Finding], arguments: tuple[Any, ...]) -> Finding:
    try:
        return look(*arguments)
    except (ValueError, RuntimeError, OSError) as error:  # the message includes the remedy
        return fault(str(error), "")
    except Exception as error:  # the other checks still run
        return fault(f"the check failed: {type(error).__name__}: {error}", "")


def _worst(answers: dict[str, Finding | Silent]) -> Finding:
    """Returns the worst finding of the nodes, with the names of those that have it."""
    said = {
        name: fault(f"the check failed there: {answer}", "see that dapo is installed there, and Ray runs")
        if isinstance(answer, Silent)
        else answer
        for name, answer in answers.items()
    }
    worst = max(said.values(), key=lambda finding: LEVELS.index(finding.level))
    if len(said) == 1:
        return worst
    names = [name for name, finding in said.items() if finding.level == worst.level]
    more = " ..." if len(names) > MAX_NODES else ""
    where = f"{len(names)} of {len(said)} nodes ({', '.join(names[:MAX_NODES])}{more})"
    return Finding(worst.level, f"{where}: {worst.found}", worst.remedy)
