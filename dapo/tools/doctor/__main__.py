"""Checks a run before it starts: `python -m dapo.doctor [--json] [--run] [--parity] [+experiment=NAME] [key=value]`.

    command line ─▶ Config ─▶ the machines, by Ray where a cluster is given ─▶ checks ─▶ a line each

Give the same arguments as to the run: each check then uses its model, data, directories and sizes. `plan.*` sets the
planner's assumptions. If `trainer.ray_address` or RAY_ADDRESS names a cluster, the checks run on each of its nodes,
else here, and no Ray is started. No files are left behind. Exit status is 0, or 1 with a fault. With `--run`, the
process becomes the run if there is no fault, for launchers that take a single command. With `--parity`, an engine and
an actor rank are started too, and compared token by token.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from dapo.config.checks import doubts
from dapo.config.compose import compose
from dapo.config.paths import output_path
from dapo.ground.console import EXIT_FAILED, EXIT_INTERRUPTED, end, say
from dapo.tools.doctor.checks import CHECKS, PARITY, Outcome, diagnose
from dapo.tools.doctor.machines import ThisMachine
from dapo.tools.doctor.subject import FAULT, WARNING, Subject, fault, ok, warning

JSON, RUN, COMPARE = "--json", "--run", "--parity"
WIDTH = max(len(check.name) for check in CHECKS)


def line(outcome: Outcome) -> str:
    """Returns the printed line of one check, without control characters from file names or texts."""
    found = outcome.finding
    text = f"{found.found}; {found.remedy}" if found.remedy else found.found
    shown = "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
    return f"{found.level:<8} {outcome.name:<{WIDTH}} {shown}"


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument not in (JSON, RUN, COMPARE)]
    if {"-h", "--help"} & set(arguments):
        say(__doc__)
        return
    show = JSON not in sys.argv[1:]
    outcomes: list[Outcome] = []
    try:
        for outcome in _look(arguments):
            outcomes.append(outcome)
            if show:
                say(line(outcome))
    except KeyboardInterrupt:
        end("interrupted", EXIT_INTERRUPTED)
    levels = [outcome.finding.level for outcome in outcomes]
    if not show:
        checks = [{"name": outcome.name, **asdict(outcome.finding)} for outcome in outcomes]
        say(json.dumps({"faults": levels.count(FAULT), "warnings": levels.count(WARNING), "checks": checks}, indent=1))
    if count := levels.count(FAULT):
        end(f"{count} {'fault' if count == 1 else 'faults'}", EXIT_FAILED)
    if RUN in sys.argv[1:]:
        os.execv(sys.executable, [sys.executable, "-m", "dapo.main_ppo", *arguments])


def _look(arguments: Sequence[str]) -> Iterator[Outcome]:
    try:
        subject = Subject(compose(arguments, plan=True))
        output_path(subject.cfg.trainer.output_dir)
    except ValueError as error:
        yield Outcome("configuration", fault(str(error), ""))
        return
    checks = (*CHECKS, PARITY) if COMPARE in sys.argv[1:] else CHECKS
    said = "; ".join(doubts(subject.cfg))
    found = warning(said, "") if said else ok(f"output directory {subject.cfg.trainer.output_dir}")
    yield Outcome("configuration", found)
    if not subject.address:
        yield from diagnose(subject, ThisMachine(), checks)
        return
    from dapo.tools.doctor.nodes import RayNodes  # imports Ray

    try:
        nodes = RayNodes(subject.address)
    except (OSError, ValueError, RuntimeError) as error:
        found = fault(
            f"no cluster at {subject.address} (`trainer.ray_address`, RAY_ADDRESS): {error}",
            "start it, give the head's HOST:PORT and the token it was started with, or `trainer.ray_address=local`",
        )
        yield Outcome("Ray", found)
        return
    try:
        yield Outcome("Ray", ok(f"{len(nodes.names)} nodes at {subject.address}"))
        yield from diagnose(subject, nodes, checks)
    finally:
        nodes.close()


if __name__ == "__main__":
    main()
