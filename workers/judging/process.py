"""Runs vLLM's OpenAI-compatible server until its standard input closes: `python -m dapo.workers.judging.process ARGS`.

`vllm serve` is not used: it looks up the version of a package named vllm, and the CPU build has another name.
"""

import os
import signal
import sys


def main() -> None:
    """Serves until standard input closes, then kills the whole process group, including vLLM's engine. A forked process
    of the group watches the input, because Ray kills only this process when it kills the actor that started it."""
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
