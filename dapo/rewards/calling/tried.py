"""Calls a user-defined reward function on two made-up responses before any worker starts, so that errors and invalid
scores are found before all engines have started.

    driver ──entry of `reward.functions`, a row, limits──▶ python -m dapo.rewards.calling.tried ──what it gave──▶ driver

The process has the limits of a reward worker's child and ends after the test.
"""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dapo.config.reward import LimitsConfig, RewardFunctionConfig, SandboxConfig
from dapo.rewards.calling import sandbox
from dapo.rewards.calling.functions import RewardFunctions

START_S = 60.0  # time to load the function
TOKENS = 4  # length of the made-up responses


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any]


def texts(row: Row) -> dict[str, str]:
    return {f"the answer {f'Answer: {row.ground_truth}'[:60]!r}": f"Answer: {row.ground_truth}", "an empty answer": ""}


def doubts(spec: RewardFunctionConfig, row: Row, limits: LimitsConfig, key: str) -> Iterator[tuple[bool, str]]:
    """Yields (whether the function fails on every response, message) for each response without a score. key: of its
    entry."""
    asked = {"spec": asdict(spec), "row": asdict(row), "limits": asdict(limits)}
    command, tried = [sys.executable, "-m", "dapo.rewards.calling.tried"], texts(row)
    seconds = START_S + len(tried) * limits.wall_s
    try:
        done = subprocess.run(
            command, input=json.dumps(asked, default=str), capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        yield True, f"`{key}` ({spec.path}) could not be tried within {seconds:g} s"
        return
    given = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [(what, one["error"]) for what, one in zip(tried, given, strict=False) if "error" in one]
    if len(given) < len(tried):
        slow = done.returncode == -signal.SIGALRM
        why = (
            f"it took longer than `reward.limits.wall_s` ({limits.wall_s:g})"
            if slow
            else f"exit code {done.returncode}"
        )
        failed.append(([*tried][len(given)], why))
    for what, why in failed:
        yield len(failed) == len(tried) or not given, f"`{key}` ({spec.path}) has no score for {what}: {why}"
    for what, one in zip(tried, given, strict=False):
        if "error" not in one and one["reward"] is None:
            yield (
                False,
                f"`{key}` ({spec.path}) gives None for {what}: such responses are left out as unscorable; give a "
                "number where an answer is right or wrong",
            )


def main() -> None:
    asked, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the function's prints out of our output
    row = Row(**asked["row"])
    limits = LimitsConfig(**{**asked["limits"], "sandbox": SandboxConfig(**asked["limits"]["sandbox"])})
    functions = RewardFunctions([RewardFunctionConfig(**asked["spec"])])
    sandbox.apply(limits)
    for text in texts(row).values():
        signal.setitimer(signal.ITIMER_REAL, limits.wall_s)  # ends the process
        extra = {**row.extra_info, "num_response_tokens": TOKENS}
        found: dict[str, Any]
        try:
            reward = functions.score(row.data_source, text, row.ground_truth, extra).reward
            found = {"reward": None if math.isnan(reward) else reward}
        except MemoryError:
            found = {"error": "it needs more than `reward.limits.memory_bytes`"}
        except Exception as error:
            found = {"error": str(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
