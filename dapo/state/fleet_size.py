"""The number of engines that a running run is asked for: a file in its directory, by `dapo scale`."""

from pathlib import Path

from omegaconf import OmegaConf

from dapo.state.run_dir import CONFIG

WANTED = "engines.wanted"


def wanted_engines(directory: Path) -> int | None:
    """Returns the number; None if there is none."""
    try:
        return int((directory / WANTED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def least_engines(directory: Path) -> int:
    """Raises ValueError if this is no run, or its engines cannot join and leave."""
    try:
        cfg = OmegaConf.load(directory / CONFIG)
        least, colocate, only = cfg.rollout.min_engines, cfg.trainer.colocate, cfg.trainer.only
    except (OSError, AttributeError) as error:
        raise ValueError(f"{directory} is not the directory of a run: its {CONFIG} cannot be read ({error})") from error
    if colocate == "time" or only == "train":
        what = "`trainer.colocate` (time)" if colocate == "time" else "`trainer.only` (train)"
        raise ValueError(f"{directory} has {what}, without engines that have GPUs of their own and can join and leave")
    return int(least)


def want_engines(directory: Path, number: int) -> None:
    """Raises ValueError as `least_engines` does, and if this is less."""
    if number < (least := least_engines(directory)):
        raise ValueError(f"engines={number} is less than `rollout.min_engines` ({least}) of {directory}")
    part = directory / f"{WANTED}.part"
    part.write_text(f"{number}\n", encoding="utf-8")
    part.replace(directory / WANTED)
