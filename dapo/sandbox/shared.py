"""The one sandbox of this process and the processes forked from it, used by reward functions and tools."""

from dapo.config.reward import SandboxConfig
from dapo.sandbox.client import Sandbox
from dapo.sandbox.program import Outcome, Program

_sandboxes: list[Sandbox] = []  # at most one


def start(limits: SandboxConfig, *, allow_unconfined: bool = False) -> Sandbox:
    while _sandboxes:
        _sandboxes.pop().close()
    _sandboxes.append(Sandbox(limits, allow_unconfined=allow_unconfined))
    return _sandboxes[0]


def run(program: Program) -> Outcome:
    """Raises SandboxError if the sandbox failed, not the program."""
    return current().run(program)


def current() -> Sandbox:
    return _sandboxes[0] if _sandboxes else start(SandboxConfig())
