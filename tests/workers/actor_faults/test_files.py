"""Ranks that cannot write or read files: which failures they outlive."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo.types import TrainSequence
from dapo.workers.actor import ActorPool
from dapo.workers.remote import RemoteError
from tests.support.training.plain_reference import checksum, save, train_batch

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory with room for next to nothing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_error_of_all_ranks_which_go_on(pool: ActorPool, full_disk: Path, tmp_path: Path) -> None:
    before = checksum(pool)
    for _ in range(2):
        with pytest.raises(RemoteError, match="FilesError: .*/state could not be written: .*No space left on device"):
            asyncio.run(pool.save(str(full_disk / "state"), 0))
        with pytest.raises(RemoteError, match="FilesError: .*/hf: actor rank 0: SafetensorError: .*No space left"):
            asyncio.run(pool.export_hf(str(full_disk / "hf")))
    asyncio.run(pool.save(str(tmp_path / "state"), 0))
    asyncio.run(pool.export_hf(str(tmp_path / "hf")))
    asyncio.run(pool.load(str(tmp_path / "state"), 0))
    assert checksum(pool) == before


def test_files_that_cannot_be_made_or_read_are_one_error_of_all_ranks(
    pool: ActorPool, sequences: tuple[TrainSequence, ...], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    place = str(tmp_path / "file" / "state")
    for write in (pool.save(place, 0), pool.export_hf(place)):
        with pytest.raises(RemoteError, match=r"FilesError: .*(NotADirectoryError|FileExistsError): "):
            asyncio.run(write)
    save(pool, tmp_path / "state")
    with pytest.raises(RemoteError, match=r"FilesError: .*/none could not be loaded: .*FileNotFoundError|No such file"):
        asyncio.run(pool.load(str(tmp_path / "none"), 0))
    again = str(tmp_path / "again")
    attempts = (pool.update(train_batch(0, sequences)), pool.save(again, 0), pool.export_hf(again))
    for attempt in (*attempts, pool.gather_bucket("broadcast", 0, "a bucket")):
        with pytest.raises(RemoteError, match="Refused: .* of no policy version; load a checkpoint"):
            asyncio.run(attempt)
    asyncio.run(pool.load(str(tmp_path / "state"), 0))
    asyncio.run(pool.update(train_batch(0, sequences)))


def test_files_that_ranks_do_not_share_with_the_driver_are_found(pool: ActorPool, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("this run")
    asyncio.run(pool.check_shared(str(token), "this run"))
    for path, content, shown in ((token, "that run", "this run"), (tmp_path / "none", "this run", "FileNotFoundError")):
        with pytest.raises(RemoteError, match=rf"`trainer.output_dir`: actor ranks on [0-9.]+ \({shown}.* do not see"):
            asyncio.run(pool.check_shared(str(path), content))
