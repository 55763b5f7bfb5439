"""Real child processes around a reward function: started, used and found to be gone."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from dapo.config.reward import LimitsConfig, RewardFunctionConfig
from dapo.rewards.calling.fork_server import Item
from dapo.workers.scoring.children import Children

LIMITS = {"cpu_s": 1.0, "wall_s": 3.0, "memory_bytes": 256 << 20}


def item(text, truth="7"):
    return Item(source="test", text=text, ground_truth=truth, extra_info={})


def use(path, body, *, count=1, timeout_s=60, **limits):
    """Runs `body(children)` with children of the function at `path`, or of an entry of `reward.functions`; afterwards
    none of the processes is left."""
    function = RewardFunctionConfig(path=path) if isinstance(path, str) else path

    async def whole():
        async with Children([function], LimitsConfig(**{**LIMITS, **limits}), count) as children:
            async with asyncio.timeout(timeout_s):
                result = await body(children)
            left = [*children.pids, children.about["pid"]]
        deadline = time.monotonic() + 5
        while alive := [pid for pid in left if runs(pid)]:
            assert time.monotonic() < deadline, f"processes {alive} are left"
            await asyncio.sleep(0.02)
        return result

    return asyncio.run(whole())


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def busy_processes(per_core=2):
    """Processes that only compute, each in a session of its own: the kernel may share cores by these."""
    command = [sys.executable, "-c", "while True: pass"]
    count = per_core * (os.cpu_count() or 1)
    spinners = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
