"""Prints the lines that a person reads while a program runs, and ends it with one message and an exit code.

In: text. Out: standard output for what happens, standard error for what went wrong.
"""

import sys
from typing import NoReturn

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # the shell's code for Ctrl-C
EXIT_RESUMABLE = 85  # SIGTERM or SIGUSR1 (Slurm, spot machines): saved, to be continued


def say(line: str) -> None:
    """Prints one line at once, also where the output is a file."""
    print(line, flush=True)


def warn(message: str) -> None:
    """Prints one line about what went wrong and did not stop the run."""
    print(message, file=sys.stderr, flush=True)


def end(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Leaves the program with one message."""
    warn(f"dapo: {message}")
    sys.exit(code)
