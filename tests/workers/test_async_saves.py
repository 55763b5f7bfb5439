"""What ranks write beside their updates, and what they say of the files that they have written."""

import asyncio
import hashlib
import json
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import ray

from dapo.pools import ActorsLost, Updated
from dapo.state import manifest
from dapo.state.manifest import BrokenCheckpoint, seal, verify
from dapo.types import TrainSequence
from dapo.workers.actor import ActorPool
from dapo.workers.remote import RemoteError
from dapo.workers.training.processes import NICENESS
from tests.support.training.plain_reference import (
    LENGTHS,
    checksum,
    make_config,
    make_model,
    make_sequences,
    on_all,
    stale,
    start_own_pool,
    start_pool,
    train_batch,
    version_of,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="module")
def sequences(model_dir: Path) -> tuple[TrainSequence, ...]:
    return stale(make_sequences(model_dir, LENGTHS))


def updated(pool: ActorPool, version: int, sequences: tuple[TrainSequence, ...]) -> Coroutine[Any, Any, Updated]:
    return pool.update(train_batch(version, sequences))


def save(pool: ActorPool, directory: Path, version: int) -> None:
    """A whole checkpoint of the ranks, which do nothing else meanwhile."""
    asyncio.run(pool.save(str(directory / "actor"), version))
    asyncio.run(pool.export_hf(str(directory / "hf")))


def digests(directory: Path) -> dict[str, str]:
    """Sums of all files but DCP's table, which two saves write differently."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != ".metadata"]
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not path.match(manifest.DIGESTS)
    }


@pytest.mark.parametrize(("ranks", "lora"), [(1, 0), (2, 4)])
def test_what_is_written_beside_updates_is_what_was_copied(
    model_dir: Path, sequences: tuple[TrainSequence, ...], tmp_path: Path, ranks: int, lora: int
) -> None:
    """And the updates are what they are without it. On one rank a full tensor is the shard itself."""
    cfg = make_config(model_dir, num_workers=ranks)
    cfg.model.lora.rank = lora
    pool = start_pool(cfg)
    asyncio.run(updated(pool, 0, sequences))
    save(pool, tmp_path / "first", 1)
    asyncio.run(updated(pool, 1, sequences))
    asyncio.run(updated(pool, 2, sequences))
    trained = checksum(pool)
    asyncio.run(pool.load(str(tmp_path / "first" / "actor"), 1))  # but for the learning rate, which is set anew
    save(pool, tmp_path / "wanted", 1)
    at_one = checksum(pool)

    async def beside() -> None:
        directory = tmp_path / "found"
        directory.mkdir()
        await pool.stage(1, export=True)
        await updated(pool, 1, sequences)
        writing = pool.write_staged(str(directory / "actor"), str(directory / "hf"))
        await asyncio.gather(writing, updated(pool, 2, sequences))

    asyncio.run(beside())
    assert on_all(pool, lambda worker: worker._staged is None) == [True] * ranks, "its memory is free again"
    for worker in ray.get([each.process.remote() for each in pool._ranks.workers], timeout=60):
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) < NICENESS, "the thread that trains gives way too"
        priorities = [os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir(f"/proc/{worker.pid}/task")]
        assert NICENESS in priorities, "the thread that writes does not give way"
    assert checksum(pool) == trained != at_one and on_all(pool, version_of) == [3] * ranks
    found = digests(tmp_path / "found")
    assert found == digests(tmp_path / "wanted") and len(found) >= ranks + 3
    assert ("actor/lora.json" in found) == ("hf/adapter/adapter_config.json" in found) == bool(lora)
    asyncio.run(pool.load(str(tmp_path / "found" / "actor"), 1))
    assert checksum(pool) == at_one
    asyncio.run(updated(pool, 1, sequences))
    asyncio.run(updated(pool, 2, sequences))
    assert checksum(pool) == trained, "the optimizer is that of version 1 too"


def test_ranks_hash_what_they_write_and_sealing_reads_none_of_it_back(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(start_pool(make_config(model_dir, num_workers=2)), tmp_path, 0)
    lists = {path.name: json.loads(path.read_text()) for path in tmp_path.rglob(manifest.DIGESTS)}
    assert {name: sorted(entries) for name, entries in lists.items() if name.startswith("rank")} == {
        "rank_00000.sha256.json": [".metadata", "__0_0.distcp"],
        "rank_00001.sha256.json": ["__1_0.distcp"],
    }
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for path, data in written.items():
        if not path.match(manifest.DIGESTS):
            [entry] = [entries[path.name] for entries in lists.values() if path.name in entries]
            assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}, path
    (tmp_path / "driver.json").write_text("{}")
    read: list[str] = []
    digest = manifest._digest
    early = tmp_path / "actor" / "__0_0.distcp"  # a bit of it flips before all is sealed
    flip(early)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_digest", lambda path, **how: read.append(path.name) or digest(path, **how))
        seal(tmp_path)
    assert read == ["driver.json"] and not list(tmp_path.rglob(manifest.DIGESTS))
    for path in (
        early,
        *[tmp_path / name for name in ("actor/__1_0.distcp", "actor/.metadata", "hf/model.safetensors")],
    ):
        if path != early:
            verify(tmp_path)
            flip(path)
        with pytest.raises(BrokenCheckpoint, match=rf"{path.name} has other content than was written \(sha256 differs"):
            verify(tmp_path)
        flip(path)
    verify(tmp_path)


def flip(path: Path) -> None:
    """One bit; and back."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.nightly
def test_ranks_that_cannot_write_beside_updates_go_on_unless_one_dies(
    model_dir: Path, sequences: tuple[TrainSequence, ...], tmp_path: Path
) -> None:
    pool = start_own_pool(make_config(model_dir, num_workers=2))
    try:
        (tmp_path / "file").write_text("no directory")
        for _ in range(2):
            asyncio.run(pool.stage(0, export=False))
            with pytest.raises(RemoteError, match=r"FilesError: .*(NotADirectoryError|FileExistsError): "):
                asyncio.run(pool.write_staged(str(tmp_path / "file" / "actor"), ""))
        with pytest.raises(RemoteError, match=r"a checkpoint of policy version 1: they are at version 0"):
            asyncio.run(pool.stage(1, export=False))
        asyncio.run(updated(pool, 0, sequences))
        save(pool, tmp_path / "one", 1)

        async def write() -> None:
            writing = asyncio.create_task(pool.write_staged(str(tmp_path / "actor"), ""))
            pool._ranks.workers[1].__ray_call__.remote(lambda worker: __import__("os")._exit(1))
            await writing

        asyncio.run(pool.stage(1, export=False))
        with pytest.raises(ActorsLost, match="rank 1"):
            asyncio.run(write())
    finally:
        pool.close()
