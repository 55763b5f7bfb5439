"""Runs vLLM's OpenAI-compatible server, and ends with whoever started it: `python -m workers.judging.process ARGS`.

`vllm serve` itself asks for the version of a package named vllm, which the CPU build is not.

In: arguments of vLLM's server, and a standard input that stays open for as long as the server may live.
"""

import os
import signal
import sys


def main() -> None:
    """Serves until the standard input ends; then the whole process group, vLLM's engine too, is killed. Another process
    of the group sees to that: Ray kills this one alone where it kills the actor that has started it."""
    if os.fork() == 0:
        _end_with_starter()
    from vllm.entrypoints.launchers.api_server.entry import main as vllm

    sys.argv[0] = "vllm"
    vllm()


def _end_with_starter() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
