"""Holds the one sandbox of this process, and of those that are forked from it, for reward functions and tools.

In: the limits of the configuration, from whoever starts the process. Out: `run`, which a function may simply call.
"""

from dapo.config.sandbox import SandboxConfig
from dapo.sandbox.client import Sandbox
from dapo.sandbox.program import Outcome, Program

_sandboxes: list[Sandbox] = []  # one at most


def start(limits: SandboxConfig, *, allow_unconfined: bool = False) -> Sandbox:
    """Starts it, in the place of one that was started before. Raises ValueError, SandboxError: see `Sandbox`."""
    while _sandboxes:
        _sandboxes.pop().close()
    _sandboxes.append(Sandbox(limits, allow_unconfined=allow_unconfined))
    return _sandboxes[0]


def run(program: Program) -> Outcome:
    """Runs a program within the limits of the sandbox. Raises SandboxError: the machinery failed, not the program."""
    return current().run(program)


def current() -> Sandbox:
    """Returns the sandbox; one with the limits of the configuration's defaults where none was started."""
    return _sandboxes[0] if _sandboxes else start(SandboxConfig())
