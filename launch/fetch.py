"""Brings models and data of a run to a folder: `python launch/fetch.py FOLDER [+experiment=NAME] [key=value ...]`.

    configuration ─▶ hub names of models and data ─▶ commit of each ─▶ files ─▶ checksums ─▶ overrides to use

What is in the folder already is not fetched again: an interrupted call goes on with the file that it broke off in. A
snapshot lies in FOLDER/OWNER--NAME@COMMIT, with its checksums in a file of that name and `.sha256` (`sha256sum
--check` reads it), and is compared with what the hub says of its files. Models come as safetensors alone. `python
launch/fetch.py --check FOLDER` reads all files again, without a network. The last line is the overrides that name the
local copies: with them and HF_HUB_OFFLINE=1 no node asks the hub.
"""

import hashlib
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dapo.config.compose import compose
from dapo.config.paths import data_parts, resolve_path
from dapo.config.sampling import SourceConfig
from dapo.config.schema import Config
from dapo.ground.console import end, say

NOT_SAFE = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.onnx", "original/*")


def local_overrides(cfg: Config, copy: Callable[[str, str], Path]) -> list[str]:
    """Returns the arguments that make a run read local copies. copy: takes "model" or "dataset" and OWNER/NAME."""

    def data(name: str) -> str:
        whole, *_ = data_parts(name)
        found = copy("dataset", whole) if _on_hub(whole) else resolve_path(whole)
        return f"{found}{name.removeprefix(whole)}"

    def files(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: files(one) for name, one in value.items()}
        return [data(name) for name in ([value] if isinstance(value, str) else value)]

    def source(one: SourceConfig) -> dict[str, Any]:
        return asdict(one) | {"files": files(one.files), "val_files": files(one.val_files)}

    def model(name: str) -> str:
        return str(copy("model", name)) if _on_hub(name) else resolve_path(name)

    found = [f"model.path={model(cfg.model.path)}", f"data.train_files={_written(files(cfg.data.train_files))}"]
    if cfg.data.sources:
        found.append(f"data.sources={_written(list(map(source, cfg.data.sources)))}")
    if cfg.data.val_files:
        found.append(f"data.val_files={_written(files(cfg.data.val_files))}")
    judges = {"reward.model.path": cfg.reward.model.path, "reward.judge.engine.path": cfg.reward.judge.engine.path}
    return found + [f"{key}={model(name)}" for key, name in judges.items() if name]


def _written(value: Any) -> str:
    """Returns a value as Hydra reads it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_written(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _on_hub(name: str) -> bool:
    # OWNER/NAME; whatever exists here, or looks like a path or an address, is none
    local = resolve_path(name) != name or name.startswith((".", "/", "~")) or "://" in name
    return not local and name.count("/") == 1


def fetch(folder: Path, kind: str, name: str) -> Path:
    """Returns the local copy of the newest commit, whole and checked.

    Raises ValueError where the hub or the network fails, and where a file is not what the hub says it is.
    """
    from huggingface_hub import HfApi, snapshot_download

    with _hub_errors(name):
        info = HfApi().repo_info(name, repo_type=kind, files_metadata=True)
    local = folder / f"{name.replace('/', '--')}@{info.sha}"
    listed = _sums(local)
    if listed.exists():
        say(f"{name}: {local} is there")
        return local
    with _hub_errors(name):
        snapshot_download(name, repo_type=kind, revision=info.sha, local_dir=local, ignore_patterns=list(NOT_SAFE))
    hub = {one.rfilename: one for one in info.siblings}
    sums = []
    for path in _files(local):
        relative = str(path.relative_to(local))
        digest = _digest(path)
        sums.append(f"{digest}  {local.name}/{relative}")
        if relative in hub and (problem := _differs(path, hub[relative], digest)):
            path.unlink()  # the next call fetches it again
            raise ValueError(f"{path}: {problem}; it is removed, run the same command again")
    listed.write_text("\n".join(sums) + "\n")
    say(f"{name}: {len(sums)} files in {local}")
    return local


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the network, the hub and the disk are behind these calls, each with errors of its own
        raise ValueError(
            f"{name}: {type(error).__name__}: {error}; see that name, network and HF_TOKEN are right and "
            "that the disk has room; the same command goes on from here"
        ) from error


def _differs(path: Path, hub: Any, sha256: str) -> str:
    """Returns in what a file differs from the hub's word: SHA-256 of a large file, git's own hash of a small one."""
    size, lfs, blob = hub.size, hub.lfs, hub.blob_id
    if size is not None and path.stat().st_size != size:
        return f"{path.stat().st_size} bytes, and the hub has {size}"
    if lfs is not None:
        return "" if lfs.sha256 == sha256 else f"SHA-256 {sha256}, and the hub's is {lfs.sha256}"
    own = hashlib.sha1(f"blob {path.stat().st_size}\0".encode() + path.read_bytes()).hexdigest()
    return "" if blob in (None, own) else f"git hash {own}, and the hub's is {blob}"


def _sums(local: Path) -> Path:
    return local.with_name(local.name + ".sha256")


def _files(local: Path) -> list[Path]:
    """Returns the files of a snapshot; the hub's own notes about an interrupted download are none."""
    found = (path for path in local.rglob("*") if path.is_file())
    return sorted(path for path in found if ".cache" not in path.relative_to(local).parts)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(folder: Path) -> list[str]:
    """Returns what is wrong with the snapshots in a folder; empty where every file is what was fetched."""
    lists = sorted(folder.glob("*.sha256"))
    found = [] if lists else [f"{folder} holds no checksums; fetch something into it first"]
    for sums in lists:
        for line in sums.read_text().splitlines():
            digest, _, name = line.partition("  ")
            path = folder / name
            if not path.is_file() or _digest(path) != digest:
                what = "is not what was fetched" if path.is_file() else "is missing"
                found.append(f"{path} {what}; remove it and {sums}, and fetch again")
    return found


def main() -> None:
    """Fetches, or checks; the exit code says whether all is there."""
    arguments = [word for word in sys.argv[1:] if word != "--check"]
    if {"-h", "--help"} & set(arguments):
        say(__doc__)
        return
    if not arguments or "=" in arguments[0] or arguments[0].startswith("-"):
        end("name a folder: python launch/fetch.py FOLDER +experiment=NAME", 2)
    folder = Path(arguments[0]).expanduser().absolute()
    try:
        if len(arguments) < len(sys.argv) - 1:
            if found := check(folder):
                end("\n".join(found), 1)
            say(f"every file in {folder} is what was fetched")
            return
        say(shlex.join(local_overrides(compose(arguments[1:]), partial(fetch, folder))))
    except (ValueError, OSError) as error:
        end(str(error), 1)


if __name__ == "__main__":
    main()
