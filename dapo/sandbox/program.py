"""Describes a run of a program: what goes into the sandbox, what comes out, and where it is confined."""

from dataclasses import dataclass
from typing import Any

SOURCE_NAME = "program.py"  # in tracebacks
FILES = ("landlock", "mounts")  # what keeps a program from the files of others, the better first


class SandboxError(RuntimeError):
    """Says that the sandbox failed, not the program: there is no outcome, and a later try may give one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Holds a Python program. Made by whoever runs it, consumed by the sandbox.

    function: called after the program has run, a method of its class `Solution` or a function of its own; "": none.
    arguments: of that call, values of JSON. familiar: names of the standard library that answers to exercises use
    without an import (`List`, `defaultdict`, ...) are there.
    """

    source: str
    stdin: str = ""
    function: str = ""
    arguments: tuple[Any, ...] = ()
    familiar: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Holds what a program did. Made by the sandbox; nothing in it can be trusted to be true but what it measured.

    stdout, stderr: decoded, at most `output_bytes` of each. result: JSON text of what the function returned; "" without
    one. exit: its exit status; negative: the signal that ended it. reason: why it was stopped: `cpu`, `wall`, `output`,
    `files`, `threads`; "" where it ended by itself. cpu_s: seconds of CPU time. wall_s: seconds from its start, less
    those in which it waited for a core.
    """

    stdout: str
    stderr: str
    result: str
    exit: int
    reason: str
    cpu_s: float
    wall_s: float

    @property
    def succeeded(self) -> bool:
        """Returns whether it ended by itself, without an error."""
        return not self.reason and self.exit == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Confinement:
    """Holds how programs are confined here. files: `landlock`, `mounts` or, unconfined, "". calls: whether system calls
    are filtered. own_user: whether each runs as a user of its own, as only root can arrange."""

    files: str
    calls: bool
    own_user: bool

    def describe(self) -> str:
        """Returns words for the start-up line."""
        files = {
            "landlock": "Landlock shows them no file but their own and Python's",
            "mounts": "a private mount namespace shows them no file but their own and Python's",
            "": "they can read and write FILES of this user (`reward.limits.allow_unconfined`)",
        }[self.files]
        calls = (
            "seccomp allows no network, process or signal"
            if self.calls
            else "no filter of system calls (`reward.limits.allow_unconfined`)"
        )
        return f"{files}, {calls}" + (", each as a user of its own" if self.own_user else "")
