"""Ends an engine of several processes when its Ray actor is gone: else they would hold their GPUs for ever.

    Ray actor ─ starts ─▶ vLLM's engine process ─ starts ─▶ workers, one per GPU, which import this

The kernel kills workers with the engine process, at their wish (`die_with`). The engine process expresses none, and
lives on when the actor is killed, or killed by the kernel for lack of memory.
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
    """Watches, in a worker process of an engine, over the process between it and the actor, where there is one."""
    actor, engine = int(os.environ.get(ACTOR) or 0), os.getppid()
    with suppress(OSError):
        if actor not in (0, engine) and _parent_of(engine) == actor:
            threading.Thread(target=_watch, args=(engine, actor), daemon=True).start()


def _watch(engine: int, actor: int) -> None:
    with suppress(OSError):  # it has ended, and this process ends with it
        while _parent_of(engine) == actor:
            time.sleep(POLL_S)
        os.kill(engine, signal.SIGKILL)


def _parent_of(pid: int) -> int:
    """Returns a process's parent, another one once that has ended. Raises OSError when the process itself has."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
