"""Runs the cheap checks on the driver at the start of each run, before any worker starts."""

from collections.abc import Callable

from dapo.config.schema import Config
from dapo.doctor.checks import CHECKS, diagnose
from dapo.doctor.finding import FAULT, WARNING
from dapo.doctor.machines import ThisMachine
from dapo.doctor.subject import Subject


def check_machine(cfg: Config, warn: Callable[[str], None]) -> None:
    """Raises ValueError with one line per fault. warn: called with one line per warning."""
    faults = []
    for outcome in diagnose(Subject(cfg), ThisMachine(), [check for check in CHECKS if check.cheap]):
        line = f"{outcome.name}: {outcome.finding.found}; {outcome.finding.remedy}"
        if outcome.finding.level == FAULT:
            faults.append(line)
        elif outcome.finding.level == WARNING:
            warn(line)
    if faults:
        raise ValueError("\n".join([*faults, "(trainer.preflight=false starts the run all the same)"]))
