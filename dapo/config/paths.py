"""Resolves models and data files: local paths, `pkg://PACKAGE/NAME` inside an installed package, and hub names.

Returns absolute paths, or hub names unchanged. Errors name the key, the value and the nearest existing name.
"""

import difflib
import importlib.resources
import re
from pathlib import Path

from dapo.config.facts.hub import silence

PKG_SCHEME = "pkg://"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_COLON = re.compile(r":(?!//)(?![^\[]*\])")  # neither the colon of pkg:// nor that of train[:100]
JOB_FILES = ("runtime_resources", "working_dir_files")  # Ray's parent folders of a job's working_dir copy


def resolve_path(value: str) -> str:
    """Returns `pkg://PACKAGE/NAME` and existing local paths as absolute paths; anything else (a hub name) unchanged."""
    path = _local_path(value)
    return str(path.absolute()) if path is not None and path.exists() else value


def checked_path(value: str, *, key: str) -> str:
    """Like `resolve_path`, but a value that can only be a local path must exist. key: named in the error. Raises
    ValueError with the nearest existing name."""
    resolved = resolve_path(value)
    if resolved != value or Path(value).exists() or not _looks_local(value):
        return resolved
    _refuse_scheme(value, key)
    path = _local_path(value)
    if path is None:
        raise ValueError(f"`{key}` ({value}): the package is not installed; install it or give a path")
    folder, written = path.absolute().parent, value.rstrip("/")
    if not folder.is_dir():
        near = _nearest(folder.name, folder.parent)
        there = f"{written.removesuffix(f'{folder.name}/{path.name}')}{near}/{path.name}"
        found = near and (folder.with_name(near) / path.name).exists()
        remedy = f"did you mean {there}?" if found else "give an existing path"
        raise ValueError(f"`{key}` ({value}) does not exist, nor does its folder {folder}; {remedy}")
    near = _nearest(path.name, folder)
    remedy = f"did you mean {written.removesuffix(path.name)}{near}?" if near else "give an existing path"
    raise ValueError(f"`{key}` ({value}) does not exist in {folder}; {remedy}")


def data_parts(value: str) -> tuple[str, str, str]:
    """Splits NAME, NAME:SPLIT or NAME:CONFIG:SPLIT into (name, configuration, split), with "" for missing parts. If the
    whole value exists as a path, it is the name."""
    name, *rest = _COLON.split(value)
    if not rest or len(rest) > 2 or Path(resolve_path(value)).exists():
        return value, "", ""
    return name, "".join(rest[:-1]), rest[-1]


def checked_data(value: str, *, key: str) -> str:
    """Like `checked_path`, also for FOLDER:SPLIT and FOLDER:CONFIG:SPLIT."""
    name, *_ = data_parts(value)
    whole = name == value or Path(resolve_path(name)).is_file()  # a file has no splits
    return checked_path(value, key=key) if whole else checked_path(name, key=key) + value.removeprefix(name)


def _nearest(name: str, folder: Path) -> str:
    """Returns the nearest name in `folder`, preferring one that differs only in leading zeros; empty if none is
    near."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:  # missing or not readable
        return ""
    same = [one for one in names if _without_zeros(one) == _without_zeros(name)]
    return next(iter(same or difflib.get_close_matches(name, names, n=1, cutoff=0.4)), "")


def _without_zeros(name: str) -> str:
    return re.sub(r"(?<!\d)0+(?=\d)", "", name)


def not_on_hub(key: str, name: str, error: Exception | None, what: str = "directory") -> tuple[str, str]:
    """Returns problem and remedy for a name found neither here nor on the hub. error: from reading it. what: expected
    kind."""
    from huggingface_hub import constants

    here = f"`{key}` ({name}): {'' if '/' in name else f'no such {what} in {Path.cwd()}, and '}"
    if constants.HF_HUB_OFFLINE and silence() is None:
        return (
            f"{here}not whole in the hub's cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set",
            f"`hf download {name}` on this node, give a local {what}, or unset HF_HUB_OFFLINE",
        )
    error = silence() or error
    short = str(error).strip().splitlines()[:1]
    return (
        f"{here}{type(error).__name__}: {short[0] if short else 'no message'}",
        "check the name and the network, log in with `hf auth login` (HF_TOKEN) for what is gated, or give a local "
        f"{what}",
    )


def output_path(value: str) -> Path:
    """Returns `trainer.output_dir` as an absolute path. Raises ValueError for a URL, and for a path in Ray's copy of
    the job's working directory, which is deleted with the cluster."""
    _refuse_scheme(value, "trainer.output_dir")
    path = Path(value).expanduser().absolute()
    if JOB_FILES in zip(path.parts, path.parts[1:], strict=False):
        raise ValueError(
            f"`trainer.output_dir` ({value}) is {path}: in Ray's copy of the folder that the job took along, which "
            "goes with the cluster; give an absolute path on storage that all nodes share, as in "
            f"trainer.output_dir=/shared/{path.name}"
        )
    return path


def _refuse_scheme(value: str, key: str) -> None:
    """Raises ValueError for URLs such as s3://..., which would become a local folder `s3:`."""
    if _SCHEME.match(value) and (key == "trainer.output_dir" or not value.startswith(PKG_SCHEME)):
        raise ValueError(
            f"`{key}` ({value}) is no local path, and files are read and written as local ones alone; give the path at "
            "which that storage is mounted on every node, or copy the files before or after the run"
        )


def _local_path(value: str) -> Path | None:
    if not value.startswith(PKG_SCHEME):
        return Path(value).expanduser()
    package, _, name = value.removeprefix(PKG_SCHEME).partition("/")
    try:
        return Path(str(importlib.resources.files(package))) / name
    except (ImportError, TypeError, ValueError):  # TypeError, ValueError: not a package name
        return None


def _looks_local(value: str) -> bool:
    # A hub name is NAME or OWNER/NAME, so a second slash is a path too.
    starts, ends = ("/", ".", "~", PKG_SCHEME), (".parquet", ".json", ".jsonl", "/")
    return value.startswith(starts) or value.endswith(ends) or value.count("/") > 1


def config_dir() -> Path:
    """Returns the folder of the YAML files: inside an installed wheel, or next to the package in a checkout."""
    here = Path(__file__).resolve().parents[1]
    found = next((path for path in (here / "_config", here.parent / "config") if (path / "dapo.yaml").is_file()), None)
    if found is None:
        raise FileNotFoundError(f"no dapo.yaml in {here / '_config'} or {here.parent / 'config'}; reinstall dapo")
    return found
