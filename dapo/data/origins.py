"""Records the exact version of each input: the commit for hub repositories; size and date for local files."""

from datetime import UTC, datetime
from pathlib import Path

from dapo.config.facts.hub import HUB_S, cached_commit
from dapo.config.paths import data_parts, resolve_path
from dapo.config.schema import Config
from dapo.data.sources import held_out_files, train_files

UNKNOWN = "unknown commit"


def origins(cfg: Config) -> dict[str, str]:
    """Returns `origin` of each model and data file, by configuration key. Called after they were loaded."""
    models = {
        "model.path": cfg.model.path,
        "reward.model.path": cfg.reward.model.path,
        "reward.judge.engine.path": cfg.reward.judge.engine.path,
    }
    found = {key: origin(name, "model") for key, name in models.items() if name}
    for one in (*train_files(cfg.data), *held_out_files(cfg.data)):
        found |= {f"{one.key}[{index}]": origin(name, "dataset") for index, name in enumerate(one.files)}
    return found


def origin(name: str, kind: str) -> str:
    """Returns `OWNER/NAME@COMMIT`, or a local path with its size in bytes and the time of its newest file. kind:
    "model" or "dataset" on the hub. If the hub's cache has several commits, the one read last counts. If the cache has
    none, the hub is queried; without an answer the commit is "unknown commit"."""
    repository, *_ = data_parts(name)
    part = name.removeprefix(repository)
    path = Path(resolve_path(repository))
    if path.exists():
        return f"{path}{part} ({_about(path)})"
    return f"{repository}@{cached_commit(repository, kind) or _asked(repository, kind) or UNKNOWN}{part}"


def _about(path: Path) -> str:
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    stats = [each.stat() for each in files]
    newest = datetime.fromtimestamp(max((one.st_mtime for one in stats), default=path.stat().st_mtime), UTC)
    count = f"{len(files)} files, " if path.is_dir() else ""
    return f"{count}{sum(one.st_size for one in stats):,} bytes, {newest:%Y-%m-%d %H:%M:%S} UTC"


def _asked(repository: str, kind: str) -> str:
    from huggingface_hub import HfApi

    try:
        return str(HfApi().repo_info(repository, repo_type=kind, timeout=HUB_S).sha)
    except Exception:  # offline, network, permissions, unknown name
        return ""
