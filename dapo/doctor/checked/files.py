"""Checks of the files that a node reads: models, on disk or from the hub, reward functions, data. Run on every node."""

import os
from pathlib import Path

from dapo.config.facts.hub import unreachable
from dapo.config.facts.model_files import offline_snapshot, weights_problems
from dapo.config.facts.model_shape import cached_config
from dapo.config.paths import not_on_hub
from dapo.doctor.finding import Finding, fault, ok, warning
from dapo.doctor.question import Question, sizes_of
from dapo.plan.terms import size

SHARED = "copy it to the same path on every node, or put it on a file system that all nodes share"


def models(question: Question) -> Finding:
    """Checks that each model is readable here and equals the driver's."""
    found = []
    for key, path in question.models.items():
        here = _directory(key, path, question.sizes[key]) if key in question.sizes else _hub(key, path)
        if here.level != "ok":
            return here
        found.append(here.found)
    return ok("; ".join(found))


def _directory(key: str, path: str, expected: dict[str, int]) -> Finding:
    folder = Path(path)
    try:
        here = sizes_of(folder)
        for name in here:
            with (folder / name).open("rb") as file:
                file.read(1)
    except OSError as error:
        return fault(f"`{key}` ({path}) cannot be read: {error}", SHARED)
    if others := sorted(name for name in expected | here if expected.get(name) != here.get(name)):
        return fault(f"`{key}` ({path}) differs from the driver's in {', '.join(others[:4])}", SHARED)
    if problems := weights_problems(folder):
        return fault(f"`{key}` ({path}): {problems[0]}", "copy or download the model again")
    weights = [here[name] for name in here if name.endswith(".safetensors")]
    return ok(f"`{key}`: {len(weights)} files of {size(sum(weights))}")


def _hub(key: str, name: str) -> Finding:
    from huggingface_hub import constants

    if (folder := offline_snapshot(name)) and (problems := weights_problems(folder)):
        return fault(f"`{key}` ({name}): {problems[0]}", f"`hf download {name}` on this node, or unset HF_HUB_OFFLINE")
    if cached_config(name):
        return ok(f"`{key}` ({name}) is in the hub's cache")
    error = unreachable(name, "model")
    if error or constants.HF_HUB_OFFLINE:
        return fault(*not_on_hub(key, name, error))
    return ok(f"`{key}` ({name}) can be fetched from the hub")


def data(question: Question) -> Finding:
    """Checks that function and data files are readable here; data gives only a warning, as only the driver reads it."""
    for key, path in question.files.items():
        if reason := _unreadable(path):
            return fault(f"`{key}` ({path}) cannot be read: {reason}", SHARED)
    for key, path in question.data.items():
        if reason := _unreadable(path):
            return warning(f"`{key}` ({path}) cannot be read, and a driver here would need it: {reason}", SHARED)
    return ok(f"{len(question.files)} files of functions and {len(question.data)} data files can be read")


def _unreadable(path: str) -> str:
    try:
        if Path(path).is_dir():
            os.listdir(path)
        else:
            with open(path, "rb") as file:
                file.read(1)
    except OSError as error:
        return str(error)
    return ""
