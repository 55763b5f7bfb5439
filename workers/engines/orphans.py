"""Ends a multi-process engine when its Ray actor dies; otherwise its processes would hold their GPUs forever.

    Ray actor ─ starts ─▶ vLLM's engine process ─ starts ─▶ workers, one per GPU, which import this

Workers ask the kernel to kill them when the engine process ends (`die_with`). The engine process does not, and survives
when the actor is killed, for example for lack of memory.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

ACTOR = "DAPO_ENGINE_ACTOR"  # in the environment of an engine's processes: the process id of its actor
POLL_S = 1.0


def end_with_actor() -> None:
    """In a worker process: watches the engine process, if there is one between this process and the actor."""
    actor, engine = int(os.environ.get(ACTOR) or 0), os.getppid()
    with suppress(OSError):
        if actor not in (0, engine) and _parent_of(engine) == actor:
            threading.Thread(target=_watch, args=(engine, actor), daemon=True).start()


def _watch(engine: int, actor: int) -> None:
    with suppress(OSError):  # the engine process has ended, and this process ends with it
        while _parent_of(engine) == actor:
            time.sleep(POLL_S)
        os.kill(engine, signal.SIGKILL)


def _parent_of(pid: int) -> int:
    """Returns a process's parent, which changes once the parent has ended. Raises OSError if the process has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
