"""Describes in one log line the limits of reward functions."""

from typing import Any

from dapo.config.reward import RewardConfig


def describe(cfg: RewardConfig, about: dict[str, Any]) -> str:
    """Returns limits, concurrency and what is not protected. about: as returned by `RewardWorker.start`."""
    limits, granted = cfg.limits, about["granted"]
    switches = {"processes": limits.allow_processes, "network": limits.allow_network}
    refused = [name for name, allowed in switches.items() if not allowed and name not in granted]
    line = (
        f"reward: {cfg.num_workers} x {cfg.children_per_worker} processes, each limited to {limits.cpu_s:g} s "
        f"CPU and {limits.wall_s:g} s a response, {limits.memory_bytes >> 20} MiB above its imports, files of "
        f"{limits.file_bytes >> 10} KiB"
    )
    if granted:
        line += f", no {' and no '.join(granted)}"
    if refused:
        line += f"; this kernel grants no limit of {' and '.join(refused)} (seccomp)"
    if about["programs"]:
        line += f"; programs of the model: {about['programs']}"
    if about["asynchronous"]:
        line += f"; {', '.join(about['asynchronous'])}: {cfg.concurrency} responses at a time in each worker"
    if about["without_canary"]:
        line += f"; no known answers for {', '.join(about['without_canary'])} (no `canaries` in its module)"
    return line
