"""Handles early failures of a command, with the standard library only: Ctrl-C during imports, missing packages."""

import os
import sys
from importlib.util import find_spec
from types import TracebackType

NEEDED = "hydra"  # each command loads it
EXIT_INTERRUPTED = 130  # as in dapo.ground.console, which needs a package


def install() -> None:
    """Installs the hook for uncaught exceptions."""
    sys.excepthook = _tell


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("dapo: interrupted", file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)
    if isinstance(error, ModuleNotFoundError) and find_spec(NEEDED) is None:
        print(
            f"dapo: {error}: {sys.executable} has not the packages of dapo; activate their environment "
            "(`source .venv/bin/activate` in the checkout), or install it (`bash launch/install.sh`)",
            file=sys.stderr,
        )
        return
    sys.__excepthook__(kind, error, trace)
